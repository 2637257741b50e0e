"""The memory that the feeds of a process may fill with samples ahead of need."""

from __future__ import annotations

import threading
from collections import deque


class Claim:
    """Bytes that a feed wants to fill: granted when there is room, in the order of asking."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.granted = threading.Event()


class Budget:
    """A number of bytes that all feeds of a process share.

    It bounds what is read ahead, and is exceeded where the training would wait otherwise: by the
    first window of each feed (nobody knows its size before), and by the window that a feed reads
    because its consumer waits for it.
    """

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()
        self._waiting: deque[Claim] = deque()

    def claim(self, size: int) -> Claim:
        """Ask for bytes: wait for ``granted`` of what is returned."""
        claim = Claim(size)
        with self._lock:
            self._waiting.append(claim)
            self._grant()
        return claim

    def force(self, claim: Claim) -> None:
        """Grant a claim at once."""
        with self._lock:
            if claim in self._waiting:
                self._waiting.remove(claim)
                self._give(claim)

    def give_back(self, size: int) -> None:
        """Free bytes; less than 0: a claim was too small."""
        with self._lock:
            self.used -= size
            self._grant()

    def _grant(self) -> None:
        while self._waiting and (
            self.used + self._waiting[0].size <= self.limit or not self._waiting[0].size
        ):
            self._give(self._waiting.popleft())

    def _give(self, claim: Claim) -> None:
        self.used += claim.size
        claim.granted.set()
