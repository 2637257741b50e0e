"""Work shared by a few threads and the caller's own."""

from __future__ import annotations

import threading
from collections.abc import Callable


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
