"""Limits on the time without a step, and the verdict on ranks that make none (pure).

What looks like a hang is mostly the program's own way of working: an evaluation, a save to a slow
store, a lock, a retry. So a suspicion only looks. It comes after ten times the job's slowest step,
``floor`` at least. Two things are certain, and reported then: a stopped rank, and flight recorders
that show different collectives. All else waits for ``patience`` without any sign of work, or for
``busy_patience`` with signs of work; both grow with the longest wait that the job has got over. In
start-up, the first steps, phases not seen before and the wait for data the start allowance is the
patience. A phase seen before has five times its longest duration (or, where steps are made inside
it, five times the longest time between two of them).

A stall that comes back at the same place after a restart is the program's own way of working: each
time the job waits four times as long. Nothing else can be done for it, and under srun it would wait
as well.

Once a rank has ended well the job is ending: the others may evaluate, save or upload at their own
pace, as under srun.

A rank that waits for its GPU uses a whole core, since CUDA spins. So the CPU time of a rank that
has a GPU open is a sign of work only where its stack moves or is not known. If a flight recorder
has a rank in one collective for longer than the limit, the rank waits, whatever CPU it uses.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.job.tempo import Tempo
from srun_wrapper.protocol.looking_messages import WorkCounters
from srun_wrapper.protocol.messages import SlotActivity

STEP_FACTOR = 10.0
PHASE_FACTOR = 5.0
BUSY_FACTOR = 20.0
WARM_UP = 3  # steps of an epoch that do not count: compilation, first collectives
AGAIN_FACTOR = 4.0  # of the patience, for each time that the same stall has come back
QUIET_CPU = 0.05  # of one core, per rank
QUIET_IO = 8 << 10  # bytes per second, per rank: log lines and pings
QUIET_FAULTS = 10  # page faults per second, per rank
LOCATE = 2.0  # s without a step until the ranks are looked at for the first time
LOCATE_FACTOR = 3.0  # slowest steps, likewise
LATEST = 5.0  # s from the end of a step until it is known here, and recorders have been read
START_INSPECT = 30.0  # s until a first inspection, for stopped ranks only, below the limit


@dataclass(slots=True)
class Pace:
    """The job's own rhythm, learned over all epochs."""

    floor: float
    busy_limit: float
    start_limit: float
    hang_limit: float = 300.0
    again: int = 0  # times that the stall of now has come back after a restart
    stopped_again: bool = False  # and a rank was stopped the last time
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

    def patience(self) -> float:
        """Seconds without an advance and without a sign of work after which the job hangs."""
        return max(self.hang_limit, self.limit()) * AGAIN_FACTOR**self.again

    def busy_patience(self) -> float:
        """Seconds without an advance after which the job hangs although its ranks work."""
        own = max(self.busy_limit, BUSY_FACTOR / STEP_FACTOR * self.limit())
        return max(own * AGAIN_FACTOR**self.again, self.patience())

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
        """Seconds without an advance after which a first inspection is due, for stopped ranks."""
        return min(self.limit(), max(START_INSPECT, self.floor))


@dataclass(slots=True)
class WorkSigns:
    """Signs of work below the ranks, from one inspection to the next."""

    at: dict[int, float] = field(default_factory=dict)  # time of each rank's last sign
    kind: dict[int, str] = field(default_factory=dict)  # what it was, in words
    _before: dict[int, tuple[float, WorkCounters]] = field(default_factory=dict)

    def note(self, now: float, samples: Mapping[int, SlotActivity], window: float) -> None:
        """Note the signs in one inspection; ``samples`` by rank."""
        for rank, sample in samples.items():
            seconds, before = window, None
            if rank in self._before:
                then, before = self._before[rank]
                seconds = max(now - then, window)
            if sign := sign_of_work(sample, window, before, seconds):
                self.at[rank], self.kind[rank] = now, sign
            if sample.used is not None:
                self._before[rank] = now, sample.used

    def forget_counters(self) -> None:
        """Forget the last counters: robust-slurm itself had the ranks do something since."""
        self._before.clear()

    def last(self, waiting: Collection[int] = ()) -> float:
        """Return the time of the last sign of a rank that is not ``waiting``; -inf if none came."""
        return max(
            (at for rank, at in self.at.items() if rank not in waiting), default=float("-inf")
        )


def sign_of_work(
    sample: SlotActivity, window: float, before: WorkCounters | None = None, seconds: float = 0.0
) -> str:
    """Return, in words, what shows that a rank works; "" if nothing does.

    ``before``: its counters ``seconds`` ago, at an earlier inspection.
    """
    if sample.state == "D":
        return "waits for a device or a file (state D)"
    if sample.moved:
        return "moves through its program"
    if sample.io > QUIET_IO * window:
        return "reads or writes"
    used = sample.used
    if used is not None and before is not None and seconds > 0:
        if used.processes != before.processes:
            return "starts or ends processes"
        if used.io - before.io > QUIET_IO * seconds:
            return "reads or writes"
        if min(used.sockets, before.sockets) >= 0 and (
            used.sockets - before.sockets > QUIET_IO * seconds
        ):
            return "sends or receives"
        if used.faults - before.faults > QUIET_FAULTS * seconds:
            return "maps memory or files"
        if used.cpu - before.cpu > QUIET_CPU * seconds:
            return "computes"
    if sample.cpu > QUIET_CPU * window + 0.02 and not sample.stack:
        return "uses the CPU"
    return ""


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
    signs: WorkSigns,
    ending: bool = False,
    held: Mapping[int, float] = {},
    mismatch: str = "",
) -> HangVerdict:
    """Decide on one inspection of all ranks.

    ``samples`` by rank; ``signs`` has noted them. ``ending``: some ranks have ended well. ``held``:
    rank → s that it has been in one collective, by its flight recorder. ``mismatch``: the line that
    says which ranks are in another collective than the others; "" if none is.
    """
    silent = pace.silent(now)
    stopped = tuple(sorted(r for r, s in samples.items() if s.state == "T"))
    at_once = not (pace.again and pace.stopped_again)  # it stops itself, each time
    if stopped and at_once and silent >= min(pace.limit(), max(START_INSPECT, pace.floor)):
        names = ", ".join(map(str, stopped))
        return HangVerdict(True, f"rank {names} is stopped (state T)", stopped)
    if silent < pace.limit():
        return HangVerdict(False, "within the limit")
    if ending:
        return HangVerdict(False, "the job is ending: some ranks have exited with code 0")
    if mismatch:
        return HangVerdict(True, f"no step for {silent:.1f} s: {mismatch}")
    # Only collectives entered since the last step: older open ones did not prevent that step.
    least, most = pace.limit(), silent + pace.slowest + LATEST
    entered = {rank for rank, seconds in held.items() if least <= seconds <= most}
    waits = {rank for rank in entered & samples.keys() if in_place(samples[rank], window)}
    idle = min(silent, now - signs.last(waits))
    where = ""
    if pace.unknown:
        where = f"phase {pace.phase!r}: " if pace.phase else "start-up: "
    if idle >= pace.patience():
        if waits and len(waits) < len(samples):
            what = f"{len(waits)} ranks wait in a collective, and no other did anything"
        elif all(s.cpu <= QUIET_CPU * window + 0.02 for s in samples.values()):
            what = "no rank did anything"
        else:
            what = "all ranks spin in place"
        return HangVerdict(True, f"{where}{what} for {idle:.0f} s", stopped)
    if silent >= pace.busy_patience():
        return HangVerdict(True, f"{where}busy, but no step for {silent:.0f} s", stopped)
    return HangVerdict(False, f"{where}no sign of work for {idle:.0f} s")


def in_place(sample: SlotActivity, window: float) -> bool:
    """True for a rank that does nothing but use CPU: its stack has not moved."""
    return sample.state in ("S", "R") and sample.io <= QUIET_IO * window and not sample.moved
