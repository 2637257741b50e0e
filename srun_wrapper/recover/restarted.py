"""Criteria for a successful restart: ranks step again or, where no steps are seen, stay alive."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.state import JobState

LIVED = 10.0  # s that ranks without steps live at least before they count as recovered
LIVED_MOST = 600.0  # s; a command may run for days before it fails
RESUMED = 1.0  # s for the ranks' reports of the step that they resumed from: not sent with steps


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
    ) -> None:
        """``restored``: the step that the ranks were given.

        ``resumed_in``: the newest epoch of which a rank said what it resumed from; ``ended``: the
        job's srun has ended; ``other_code``: the ranks are to be restarted with other code.
        """
        self._state = state
        self._phase = phase
        self._restored = restored
        self._resumed_in = resumed_in
        self._ended = ended
        self._other_code = other_code

    async def prove(
        self, incident: Incident, lived: float
    ) -> Literal["recovered", "failed", "ended"]:
        """Wait for the new epoch's first step everywhere, news that ends it, or the step's end.

        Until then nothing is recovered: ranks that die again before a step are the same trouble.
        """
        state, world = self._state, self._state.world
        stepped_before = bool(world.steppers)

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
        if world.steppers:
            incident.mark("first_step")
            incident.fresh = not stepped_before
            incident.resume_step = await self._resumed()
            await state.counters_read()
        else:
            incident.marks["first_step"] = incident.marks["launch"]
        return "ended" if state.signalled or self._ended() else "recovered"

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
