"""Work shared by a few threads and the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Buffer = TypeVar("Buffer")


def share(work: Callable[[], None], threads: int, name: str) -> None:
    """Run ``work`` in so many threads at once, this one among them; back when all have ended.

    It takes its pieces from an iterator that they have in common, and raises nothing.
    """
    helpers = [threading.Thread(target=work, name=name, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
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
    """Call ``read`` with 0 to ``count`` - 1, in at most so many threads, each with a buffer of its
    own. Raises the first OSError, after which no more are begun."""
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
