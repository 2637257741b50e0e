"""Work shared by a few threads and the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Buffer = TypeVar("Buffer")


def share(work: Callable[[], None], threads: int, name: str) -> None:
    """Run ``work`` in ``threads`` threads at once, this one included; return when all have ended.

    ``work`` takes its pieces from an iterator that the threads share, and must raise nothing.
    """
    helpers = []
    for _ in range(threads - 1):
        helper = threading.Thread(target=work, name=name, daemon=True)
        try:
            helper.start()
        except RuntimeError:  # the user has as many as are allowed: fewer do the same work
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()


def read_each(
    read: Callable[[int, Buffer], None],
    buffer: Callable[[], Buffer],
    count: int,
    threads: int,
    name: str,
) -> None:
    """Call ``read`` with 0 to ``count`` - 1, in at most ``threads`` threads, each with a buffer of
    its own. Raises the first OSError; after it, no further call begins."""
    todo = iter(range(count))  # ``next`` on it is atomic
    failed: list[OSError] = []

    def work() -> None:
        own = buffer()
        try:
            for index in todo:
                read(index, own)
                if failed:
                    return
        except OSError as err:
            failed.append(err)

    share(work, min(threads, count), name)
    if failed:
        raise failed[0]
