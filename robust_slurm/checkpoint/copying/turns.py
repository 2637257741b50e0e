"""Keeps save() and the optimizer's steps apart where a script calls them in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

DEADLINE = 1800.0
"""Seconds. A save() may wait for 900 for robust-srun's word, and for 600 for a copy; one that waits
for a lock of the script's that the stepping thread holds must not end a training."""


class Turns:
    """A step waits for a save() under way. A save() finds out that a step is under way."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stepping: set[int] = set()

    def step(self) -> bool:
        """An optimizer begins to step in this thread. False if a save() still goes on."""
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
