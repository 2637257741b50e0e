"""Keeps save() and the optimizer's steps apart where a script calls them in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A step waits for a save() under way. A save() finds out that a step is under way."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stepping: set[int] = set()

    def step(self) -> None:
        """An optimizer begins to step in this thread."""
        with self._lock:
            self._stepping.add(threading.get_ident())

    def stepped(self) -> None:
        """It is over. It may never be called, where a step has raised."""
        self._stepping.discard(threading.get_ident())

    @contextmanager
    def save(self) -> Iterator[bool]:
        """Yield True if no other thread's step is under way; then none begins meanwhile."""
        with self._lock:
            alone = self._stepping <= {threading.get_ident()}
            if not alone:
                self._stepping.clear()  # a thread that ended in its step holds up one save() only
            yield alone
