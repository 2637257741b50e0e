"""Keeps save() and the optimizer's steps apart where a script calls them in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE = 1800.0
"""Seconds. A save() may wait 900 s for robust-srun and 600 s for a copy. The limit ends a deadlock:
a save() may wait for a lock of the script that the stepping thread holds."""


class Turns:
    """Makes a step wait for a save() under way; a save() detects a step that is under way."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stepping: set[int] = set()

    def step(self) -> bool:
        """Wait for a save() under way, then note a step of this thread. False if it timed out."""
        there = self._lock.acquire(timeout=DEADLINE)
        self._stepping.add(threading.get_ident())
        if there:
            self._lock.release()
        return there

    def stepped(self) -> None:
        """Note that the step is over. Where a step has raised this may never be called."""
        self._stepping.discard(threading.get_ident())

    @contextmanager
    def save(self) -> Iterator[bool]:
        """Yield True if no other thread's step is under way; then none begins meanwhile."""
        if not self._lock.acquire(timeout=DEADLINE):
            yield False
            return
        try:
            alone = self._stepping <= {threading.get_ident()}
            if not alone:
                self._stepping.clear()  # a thread that ended in its step holds up one save() only
            yield alone
        finally:
            self._lock.release()
