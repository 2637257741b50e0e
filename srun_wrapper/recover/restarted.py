"""Criteria for a successful restart: ranks step again or, where no steps are seen, stay alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Literal

from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.lost_work import LostWork, estimate

LIVED = 10.0  # s that ranks without steps live at least before they count as recovered
LIVED_MOST = 600.0  # s; a command may run for days before it fails
RESUMED = 1.0  # s for the ranks' reports of the step that they resumed from: not sent with steps
ANEW = (
    "the script, or its optimizer, did not resume. If it has saved a checkpoint, it is about to "
    "overwrite it: have the script load its newest checkpoint whenever it starts"
)


def proving_time(lived: float) -> float:
    """Seconds that ranks without steps must live; the last epoch lived for ``lived`` seconds."""
    return min(max(lived, LIVED), LIVED_MOST)


class Restarted:
    """Decides whether a restart is a recovery."""

    def __init__(
        self,
        state: JobState,
        phase: Phase,
        restored: Callable[[], int | None],
        resumed_in: Callable[[], int],
        ended: Callable[[], bool],
        other_code: Callable[[], bool] = lambda: False,
        lost_work: LostWork | None = None,
    ) -> None:
        """``restored``: the step that the ranks were given.

        ``resumed_in``: the newest epoch of which a rank said what it resumed from; ``ended``: the
        job's srun has ended; ``other_code``: the ranks are to be restarted with other code;
        ``lost_work``: estimates what a restart cost; None: nothing is estimated.
        """
        self._state = state
        self._phase = phase
        self._restored = restored
        self._resumed_in = resumed_in
        self._ended = ended
        self._other_code = other_code
        self._lost_work = lost_work
        self._advised = self._warned = False

    async def prove(
        self, incident: Incident, lived: float
    ) -> Literal["recovered", "failed", "ended"]:
        """Wait for the new epoch's first step everywhere, news that ends it, or the step's end.

        Until then nothing is recovered: ranks that die again before a step are the same trouble.
        """
        state, world = self._state, self._state.world
        stepped_before = bool(world.steppers)
        numbered = state.progress.numbered
        guess = None  # of what is lost; looked for now, before the ranks write new files
        if self._lost_work is not None and self._restored() is None and not numbered:
            guess = asyncio.create_task(self._lost_work.newest_file(incident))
        try:
            outcome = await self._proven(incident, lived, stepped_before)
            if guess is not None and outcome == "recovered" and incident.lost_steps is None:
                estimate(incident, state.progress, await guess, anew=self._optimizer_anew())
        finally:
            if guess is not None:
                guess.cancel()
        if outcome == "recovered":
            self._advise()
        return outcome

    async def _proven(
        self, incident: Incident, lived: float, stepped_before: bool
    ) -> Literal["recovered", "failed", "ended"]:
        state, world = self._state, self._state.world

        def over() -> bool:
            news = bool(state.failures) or self._other_code()
            return news or state.signalled > 0 or self._ended()

        await state.until(lambda: over() or world.all_started(), None)
        incident.mark("launch")
        incident.started(world.started, warm=world.warm, kept=world.kept)
        if stepped_before:
            await state.until(lambda: over() or world.all_stepped(), None)
        elif not over():
            self._phase.name = "starting"
            await state.until(
                lambda: over() or world.all_exited() or bool(world.steppers), proving_time(lived)
            )
        if state.failures or self._other_code():
            # This incident lasts until the new failure; from then on it is the next one's time.
            until = min((f.last_good for f in state.failures), default=time.monotonic())
            incident.marks["first_step"] = max(until, incident.marks["launch"])
            return "failed"
        if over():
            return "ended"
        incident.steps_seen = bool(world.steppers)
        if world.steppers:
            incident.mark("first_step")
            incident.fresh = not stepped_before
            incident.resume_step = await self._resumed()
            await state.counters_read()
        else:
            incident.marks["first_step"] = incident.marks["launch"]
        return "ended" if state.signalled or self._ended() else "recovered"

    def _advise(self) -> None:
        """Say once what keeps steps from being seen, and once that training began anew."""
        state, progress = self._state, self._state.progress
        if not state.world.steppers and not self._advised:
            self._advised = True
            say(
                "no step of this program is seen, so hangs are not detected and lost time is "
                "estimated: pass --robust-progress-regex=REGEX for the line that it prints at "
                "each step, or call robust_slurm.beat(step)"
            )
        made = progress.at_failure if progress.numbered else progress.beats_at_failure
        if self._warned or self._restored() is not None or not made or made < 2:
            return
        if progress.anew():
            self._warned = True
            say(
                f"warning: the steps began anew at {progress.resume} after the restart, although "
                f"step {made} had been reached: {ANEW}"
            )
        elif not progress.numbered and self._optimizer_anew():
            self._warned = True
            say(
                "warning: the optimizer counts its steps from 1 again after the restart, although "
                f"{made} steps had been made: {ANEW}"
            )

    def _optimizer_anew(self) -> bool:
        return any(rank.source == "anew" for rank in self._state.world.running())

    async def _resumed(self) -> int | None:
        """Return the first step that was done after the restart; None if it cannot be known.

        What the ranks were given is not yet what they resumed from: a script may start anew.
        """
        state, restored = self._state, self._restored()

        def told() -> bool:
            return self._resumed_in() == state.world.epoch

        if restored is not None:
            await state.until(told, RESUMED)
        first = restored + 1 if restored is not None and told() else None
        seen = state.progress.resume if state.progress.numbered else None
        return min((step for step in (first, seen) if step is not None), default=None)
