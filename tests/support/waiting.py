"""Wait for what a test can see, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

ASKING = 4.0  # as long as a question took is slept before the next: a fifth of the time at most
MOST = 0.5  # s
BUSY = 2.0  # a deadline is meant for a machine that does nothing else; other tests are beside


def until(
    condition: Callable[[], Any], what: str, timeout: float = 60.0, every: float = 0.02
) -> None:
    """Wait until a condition holds, asked every so many seconds.

    Less often where asking takes long itself (Slurm's commands, all of /proc): what is waited for
    needs the cores more. AssertionError naming it after ``BUSY`` times ``timeout`` seconds.
    """
    deadline = time.monotonic() + BUSY * timeout
    while True:
        asked = time.monotonic()
        if condition():
            return
        took = time.monotonic() - asked
        assert time.monotonic() < deadline, f"not within {BUSY * timeout:g} s: {what}"
        time.sleep(max(every, min(MOST, ASKING * took)))


async def idle() -> None:
    """Let the loop's other tasks run until each waits for time to pass, or for the test."""
    for _ in range(50):
        await asyncio.sleep(0)
