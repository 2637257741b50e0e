"""The memory that the feeds of a process may fill with samples ahead of need, and their turns."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

READERS = 4  # windows that one process reads at once: more would only fight for its interpreter
SLOW = 1.0  # seconds after which a read is taken to wait for its file, and holds no turn


class ReadClaim:
    """Bytes that a feed wants to fill. When there is room, the claim that is ``due`` first gets it.

    ``due``: when the feed will have nothing left; claims that are due at the same time are granted
    in the order of asking. ``start`` is called with the grant, and starts the feed's thread. To
    start a thread is to wait for those that run, so many feeds must not start theirs at once.
    """

    def __init__(
        self, size: int, start: Callable[[], object] | None = None, due: float = 0.0
    ) -> None:
        self.size = size
        self.start = start
        self.due = due
        self.granted = threading.Event()
        self.began = 0.0


class ReadBudget:
    """A number of bytes that all feeds of a process share.

    It bounds what is read ahead, and is exceeded where the training would wait otherwise: by the
    first window of each feed (nobody knows its size before), and by the window that a feed reads
    because its consumer waits for it.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.used = 0
        self.readers = READERS
        """Windows that are read at the same time."""
        self._lock = threading.Lock()
        self._waiting: list[ReadClaim] = []
        self._reading: list[ReadClaim] = []

    def ask(self, claim: ReadClaim) -> None:
        """Ask for a claim's bytes: wait until it is ``granted``, read, and settle it."""
        with self._lock:
            self._waiting.append(claim)
            self._grant()

    def force(self, claim: ReadClaim) -> None:
        """Grant a claim at once."""
        with self._lock:
            if claim in self._waiting:
                self._waiting.remove(claim)
                self._give(claim)

    def settle(self, claim: ReadClaim, size: int) -> None:
        """End a claim, granted or not. ``size``: bytes that were filled, to be given back later."""
        with self._lock:
            if claim in self._waiting:
                self._waiting.remove(claim)
                self.used += size
            elif claim in self._reading:
                self._reading.remove(claim)
                self.used += size - claim.size
            self._grant()

    def give_back(self, size: int) -> None:
        """Free bytes that were filled."""
        with self._lock:
            self.used -= size
            self._grant()

    def regrant(self) -> None:
        """Grant further claims if a read has become slow; the next ``ask`` does so, too."""
        with self._lock:
            self._grant()

    def _grant(self) -> None:
        while self._waiting:
            first = min(self._waiting, key=lambda claim: claim.due)
            if not self._room(first.size):
                return
            self._waiting.remove(first)
            self._give(first)

    def _room(self, size: int) -> bool:
        if size and self.used + size > self.limit:
            return False
        late = time.monotonic() - SLOW
        return sum(claim.began > late for claim in self._reading) < self.readers

    def _give(self, claim: ReadClaim) -> None:
        self.used += claim.size
        claim.began = time.monotonic()
        self._reading.append(claim)
        claim.granted.set()
        if claim.start is not None:
            claim.start()
