"""Waiters for a change of the job's state."""

from __future__ import annotations

import asyncio
import time

from made_job import Job

from srun_wrapper.job.changes import Changes
from srun_wrapper.protocol.messages import SlotLost


def test_until() -> None:
    job = Job()

    async def check() -> None:
        state = job.state
        assert await state.until(lambda: True, 0.0)
        began = time.monotonic()
        assert not await state.until(lambda: False, 0.05)
        assert time.monotonic() - began < 5.0
        asyncio.get_running_loop().call_later(0.02, job.say, 0, SlotLost(1, 0))
        both = [state.until(lambda: bool(state.failures), 5.0) for _ in range(2)]
        assert await asyncio.gather(*both) == [True, True]

    asyncio.run(check())


def test_a_waiter_that_begins_takes_no_news_from_another() -> None:
    """On Python 3.11 wait_for starts to wait one turn later; the second waiter cleared the flag."""
    job = Job()

    async def check() -> None:
        state, loop = job.state, asyncio.get_running_loop()
        first = asyncio.create_task(state.until(lambda: bool(state.failures), 5.0))
        loop.call_soon(job.say, 0, SlotLost(1, 0))
        second = asyncio.create_task(state.until(lambda: len(state.failures) > 1, 60.0))
        done, _ = await asyncio.wait([first], timeout=2.0)
        second.cancel()
        assert done, "the first waiter has not heard of the failure"

    asyncio.run(check())


def test_a_cancellation_together_with_a_change_is_not_lost() -> None:
    """robust-srun waited for an inspection (13 s) when its ranks ended in the middle of it."""

    async def scene() -> float:
        changes = Changes()
        waiting = asyncio.create_task(changes.until(lambda: False, 10.0))
        await asyncio.sleep(0)
        began = time.monotonic()
        changes.set()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        return time.monotonic() - began

    assert asyncio.run(scene()) < 5.0
