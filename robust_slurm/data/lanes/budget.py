"""The memory that the feeds of a process may fill with samples ahead of need, and their turns."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

READERS = 4  # windows that one process reads at once: more would only fight for its interpreter
SLOW = 1.0  # seconds after which a read is waiting, for a file or for good, and takes no turn


class ReadClaim:
    """Bytes that a feed wants to fill: granted when there is room, to the one that is ``due``
    first: when its feed will have nothing left. Those that are due at once go by turns.

    ``start`` is called then: a feed's thread that has not begun yet. A thread that starts waits
    for those that run, so who begins many feeds must not start one for each of them.
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
        """End a claim, granted or not: so many bytes were filled, and are to be given back."""
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
        """Let others go on if one that reads is slow; whoever asks next sees that, too."""
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
