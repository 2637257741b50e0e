"""Wake all waiters at each change of the job's state."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


class Changes:
    """Wakes all waiters at each change.

    A flag that waiters clear would lose changes: another waiter may clear it before this one looks.
    """

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def set(self) -> None:
        changed, self._next = self._next, asyncio.Event()
        changed.set()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next change, and never cleared."""
        return self._next

    async def until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``ready()``; False when ``timeout`` seconds pass first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            try:
                # On Python 3.11 wait_for() loses a cancellation that comes together with a change,
                # and robust-srun then waited for an inspection (13 s) before it ended.
                async with asyncio.timeout(left):
                    await self.next.wait()
            except TimeoutError:
                return ready()
        return True
