"""Call all watches of a job in turns, as long as it runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from srun_wrapper.detect.guard import TICK, Watch, WatchGuard
from srun_wrapper.job.state import JobState


class Watches:
    """``stepping``: watches that are called only while ranks are expected to step."""

    def __init__(
        self,
        state: JobState,
        always: Sequence[Watch],
        stepping: Sequence[Watch],
        say: Callable[[str], None],
    ) -> None:
        self._state = state
        self._always, self._stepping = always, stepping
        self._guard = WatchGuard(say)

    async def run(self) -> None:
        """Call the watches every ``TICK`` seconds until the job ends."""
        state = self._state
        while not state.ending:
            self._call(self._always)
            # Ranks that are being stopped make no step, and that is no hang.
            if not state.failures and state.stopping_epoch < state.world.epoch:
                self._call(self._stepping)
            await asyncio.sleep(TICK)

    def _call(self, watches: Sequence[Watch]) -> None:
        for watch in watches:
            self._guard.call(watch, time.monotonic())
