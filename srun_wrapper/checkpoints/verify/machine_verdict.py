"""Test the machines after a step that came out differently on other nodes."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence

from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure, Symptom
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.machine_tests import MachineResults

Test = Callable[[Sequence[str], Symptom], Awaitable[MachineResults | None]]
Evict = Callable[[tuple[str, ...], Incident], None]


class MachineVerdict:
    """Finds the machine that computed a step wrongly, and acts on it."""

    def __init__(self, state: JobState, test: Test, evict: Evict) -> None:
        self._state = state
        self._test = test
        self._evict = evict

    async def find(self, what: str, step: int) -> MachineResults | None:
        """Test all machines of the job; None if a failure or the end came in between.

        ``what``: what differed, in words. A bad node with ranks becomes a failure, which waits
        for its recovery; a bad idle node is evicted.
        """
        found = await self._test([node.name for node in self._state.world.places], "nan")
        if found is None:
            return None
        lines = (what, *found.lines)
        if found.idle:
            self._evict_idle(found.idle, lines, step)
        if found.named:
            # Now it is a failure like any other, and the newest states are in doubt.
            at, named = time.monotonic(), tuple(found.named)
            self._state.failures.append(
                Failure("differs", at, at, named[0], evidence=lines, suspects=named, step=step)
            )
        return found

    def _evict_idle(self, names: tuple[str, ...], lines: tuple[str, ...], step: int) -> None:
        """Evict bad nodes without ranks, as after a failure."""
        at = time.monotonic()
        root = Failure("differs", at, at, "", evidence=lines, step=step)
        diagnosis = Diagnosis("differs", "node", (), lines, "differs", root)
        number = self._state.incident_id(f"check-{step}")
        self._evict(names, Incident(number, self._state.world.epoch, diagnosis, at, at))
