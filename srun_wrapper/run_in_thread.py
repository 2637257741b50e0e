"""Run calls that may never return, beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T], limit: float) -> T:
    """Run ``work()`` in a new thread and return its result; TimeoutError after ``limit`` seconds.

    The process does not wait for this thread when it exits, as it would for one of asyncio's own
    executor: a call to a dead file system may never return.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # too late
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as err:  # noqa: BLE001 - it is raised where it is awaited
            error = err
        with contextlib.suppress(RuntimeError):  # the loop is over
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="run_in_thread", daemon=True).start()
    return await asyncio.wait_for(future, limit)
