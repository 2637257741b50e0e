"""Limits on the time without a step before the job counts as hung (pure, times passed in).

The limit comes from the job itself: ten times its slowest step so far, never less than the
configured floor. Start-up, the first steps and phases not seen before have the start allowance;
a phase seen before has five times its longest duration (or, where steps are made inside it, five
times the longest time between two of them). The wait for data has the start allowance always: how
long the sources of data take next is not known from the last time.

Once a rank has ended well the job is ending: the others may evaluate, save or upload at their own
pace, within the start allowance.

Beyond the limit nothing is assumed: the ranks are inspected. A stopped rank, or all ranks quiet
(no CPU, no I/O, stacks not moving), is a hang; ranks that work get up to ``busy_limit``, because
an unannounced evaluation or a save that takes longer than the last one looks just like that. A rank
that waits for its GPU uses a whole core, since CUDA spins. If its flight recorder has it in one
collective for longer than the limit, it counts as waiting. Then the other ranks are looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.job.tempo import Tempo
from srun_wrapper.protocol.messages import SlotActivity

STEP_FACTOR = 10.0
PHASE_FACTOR = 5.0
BUSY_FACTOR = 20.0
WARM_UP = 3  # steps of an epoch that do not count: compilation, first collectives
QUIET_CPU = 0.05  # of one core, per rank
QUIET_IO = 64 << 10  # bytes per second, per rank: log lines and pings
FROZEN_ROUNDS = 3  # inspections with no stack moving anywhere: ranks that spin in a collective
FROZEN_TIME = 60.0
LOCATE = 2.0  # s without a step until the ranks are looked at for the first time
LOCATE_FACTOR = 3.0  # slowest steps, likewise
LATEST = 5.0  # s from the end of a step until it is known here, and recorders have been read
START_INSPECT = 30.0  # s between inspections during start-up, for stopped ranks only


@dataclass(slots=True)
class Pace:
    """The job's own rhythm, learned over all epochs."""

    floor: float
    busy_limit: float
    start_limit: float
    slowest: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    epoch_since: float = 0.0
    steps: int = 0  # advances seen in this epoch
    last: float = 0.0  # time of the last advance (or of the epoch's start)
    stepped: float = 0.0  # time of the last step, in whatever epoch
    phase: str = ""
    phase_since: float = 0.0
    recent: list[float] = field(default_factory=list)  # seconds per step, the last 64 reports
    tempo: Tempo = field(default_factory=Tempo)

    def new_epoch(self, now: float) -> None:
        self.epoch_since = self.last = now
        self.steps = 0
        self.phase = ""
        self.tempo.new_epoch()

    def advance(self, at: float, steps: int) -> None:
        """Note that ``steps`` more steps were done, the last of them at time ``at``."""
        gap = at - self.last
        if self.steps >= WARM_UP and gap > 0 and not self._phase_touched():
            self.slowest = max(self.slowest, gap)
            self.recent = [*self.recent[-63:], gap / steps]
            self.tempo.add(gap, steps)
        if self.phase:  # steps inside a phase: it may never be seen to end
            self._phase_took(at)
        self.steps += steps
        self.stepped = max(self.stepped, at)
        self.last = max(self.last, at)

    def _phase_touched(self) -> bool:
        return bool(self.phase) or self.phase_since > self.last

    def _phase_took(self, until: float) -> None:
        took = until - max(self.phase_since, self.last)
        self.phases[self.phase] = max(self.phases.get(self.phase, 0.0), took)

    def in_phase(self, name: str, since: float, now: float) -> None:
        """Note the phase that some rank is in now ("" for none), entered at ``since``."""
        if name == self.phase:
            return
        if self.phase:
            self._phase_took(now)
            self.last = max(self.last, now)  # leaving a phase is progress
        self.phase = name
        self.phase_since = since if name else now

    def excuse(self, now: float) -> None:
        """Note that until now no step could be made, by no fault of the ranks."""
        self.last = max(self.last, now)
        if self.phase:
            self.phase_since = max(self.phase_since, now)

    def step_time(self) -> float | None:
        """Median seconds per step of the recent past."""
        if not self.recent:
            return None
        return sorted(self.recent)[len(self.recent) // 2]

    def limit(self) -> float:
        """Seconds without an advance after which the ranks are looked at."""
        if self.unknown:
            return max(self.floor, self.start_limit)
        if self.phase:
            return max(self.floor, PHASE_FACTOR * self.phases[self.phase])
        return max(self.floor, STEP_FACTOR * self.slowest)

    def hard_limit(self) -> float:
        """Seconds after which even busy ranks count as hung."""
        if self.unknown:
            return self.limit()
        return max(self.busy_limit, BUSY_FACTOR * self.slowest, self.limit())

    @property
    def warming(self) -> bool:
        """True if no rhythm is known yet, or the epoch is in its first steps."""
        return self.steps < WARM_UP or not self.slowest

    @property
    def waits_for_data(self) -> bool:
        """True if a rank waits for its next batch, and the others for it: no machine's fault."""
        return self.phase == DATA_WAIT

    @property
    def unknown(self) -> bool:
        """True if nothing like this was seen before: only the start allowance applies."""
        if self.phase and self.steps >= WARM_UP:
            return self.phase not in self.phases or self.waits_for_data
        return self.warming

    def silent(self, now: float) -> float:
        return now - max(self.last, self.phase_since if self.phase else 0.0)

    def locate_after(self) -> float | None:
        """Seconds without an advance after which the ranks are looked at once, only to locate what
        they wait for. None: in start-up and in phases nobody can say what is long."""
        return None if self.unknown or self.phase else max(LOCATE, LOCATE_FACTOR * self.slowest)

    def inspect_after(self) -> float:
        """Seconds without an advance after which a first inspection is due."""
        return min(self.limit(), max(START_INSPECT, self.floor)) if self.unknown else self.limit()


@dataclass(frozen=True, slots=True)
class HangVerdict:
    """The verdict on one inspection. ``hung`` False: look again later."""

    hung: bool
    why: str
    ranks: tuple[int, ...] = ()  # the ranks that are stopped


def judge(
    pace: Pace,
    now: float,
    samples: Mapping[int, SlotActivity],
    window: float,
    frozen_rounds: int,
    frozen_for: float,
    ending: bool = False,
    held: Mapping[int, float] = {},
) -> HangVerdict:
    """Decide on one inspection of all ranks.

    ``samples`` by rank; ``frozen_rounds`` consecutive inspections (this one included) in which
    ranks worked but no stack moved, over ``frozen_for`` seconds. ``ending``: some ranks have ended
    well. ``held``: rank → s that it has been in one collective, by its flight recorder. If all
    ranks are in one, that proves nothing: their GPUs may still compute what comes before it.
    """
    silent = pace.silent(now)
    stopped = tuple(sorted(r for r, s in samples.items() if s.state == "T"))
    if stopped and silent >= min(pace.limit(), max(START_INSPECT, pace.floor)):
        names = ", ".join(map(str, stopped))
        return HangVerdict(True, f"rank {names} is stopped (state T)", stopped)
    if silent < pace.limit():
        return HangVerdict(False, "within the limit")
    if ending and silent < pace.start_limit:
        return HangVerdict(False, "the job is ending: some ranks have exited with code 0")
    if pace.unknown:
        what = f"phase {pace.phase!r}" if pace.phase else "start-up"
        return HangVerdict(True, f"{what} took longer than {pace.limit():.0f} s")
    if all(is_quiet(s, window) for s in samples.values()):
        return HangVerdict(True, f"no rank did anything for {silent:.1f} s")
    # Only collectives entered since the last step: older open ones did not prevent that step.
    least, most = pace.limit(), silent + pace.slowest + LATEST
    entered = {rank for rank, seconds in held.items() if least <= seconds <= most}
    waits = {rank for rank in entered & samples.keys() if in_place(samples[rank], window)}
    outside = [s for r, s in samples.items() if r not in waits]
    if waits and outside and all(is_quiet(s, window) for s in outside):
        why = f"{len(waits)} ranks wait in a collective, and no other did anything"
        return HangVerdict(True, f"{why} for {silent:.1f} s")
    if frozen_rounds >= FROZEN_ROUNDS and frozen_for >= FROZEN_TIME:
        return HangVerdict(True, f"all ranks spin in place for {frozen_for:.0f} s")
    if silent >= pace.hard_limit():
        return HangVerdict(True, f"busy, but no step for {silent:.0f} s")
    return HangVerdict(False, "ranks are busy")


def is_quiet(sample: SlotActivity, window: float) -> bool:
    """True for a rank that waits: no CPU, no I/O, no disk wait, and its stack has not moved."""
    return (
        sample.state not in ("D", "R")
        and sample.cpu <= QUIET_CPU * window + 0.02
        and sample.io <= QUIET_IO * window
        and not sample.moved
    )


def in_place(sample: SlotActivity, window: float) -> bool:
    """True for a rank that does nothing but use CPU: its stack has not moved."""
    return sample.state in ("S", "R") and sample.io <= QUIET_IO * window and not sample.moved


def is_frozen(samples: Mapping[int, SlotActivity]) -> bool:
    """True if nothing moves although CPU is used: all ranks show a stack and none changed."""
    return bool(samples) and all(s.stack and not s.moved for s in samples.values())
