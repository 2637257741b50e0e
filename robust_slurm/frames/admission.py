"""The peers of a listener that have not proved yet that they are ours: how many, and how long.

Anybody who reaches a port can open connections without end, and each costs a descriptor. So each
listener keeps few of them, for a short time, and ends the oldest for a new one: a peer that has the
key proves it within milliseconds, however many others there are.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

MOST = 256
"""Connections of a listener that have proved nothing yet."""
SECONDS = 5.0
"""s in which a new connection proves what it is, or is closed."""
CROWDED = "too many connections that do not authenticate"
LATE = "did not authenticate"

Peer = TypeVar("Peer")


class Strangers(Generic[Peer]):
    """Calls ``end(peer, why)`` for the oldest of too many peers, and for those that are late.

    ``later(seconds, call)`` schedules a call in the listener's loop; without it, the listener calls
    ``sweep`` itself. Not for several threads.
    """

    def __init__(
        self,
        end: Callable[[Peer, str], object],
        most: int = MOST,
        seconds: float = SECONDS,
        later: Callable[[float, Callable[[], None]], object] | None = None,
    ) -> None:
        self._end = end
        self._most = most
        self._seconds = seconds
        self._later = later
        self._armed = False
        self._since: dict[Peer, float] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._since)

    def enter(self, peer: Peer) -> None:
        """Add a new connection. The oldest beyond the limit is ended."""
        while len(self._since) >= self._most:
            self.evict()
        self._since[peer] = time.monotonic()
        self._arm()

    def leave(self, peer: Peer) -> None:
        """Note that a peer has proved what it is, or has gone."""
        self._since.pop(peer, None)

    def evict(self) -> bool:
        """End the oldest. False: there is none."""
        if not self._since:
            return False
        self._out(next(iter(self._since)), CROWDED)
        return True

    def sweep(self) -> None:
        """End those whose time is over."""
        before = time.monotonic() - self._seconds
        while self._since:
            peer, since = next(iter(self._since.items()))
            if since > before:
                return
            self._out(peer, LATE)

    def _out(self, peer: Peer, why: str) -> None:
        del self._since[peer]
        self._end(peer, why)

    def _arm(self) -> None:
        if self._later is not None and not self._armed and self._since:
            self._armed = True
            left = next(iter(self._since.values())) + self._seconds - time.monotonic()
            self._later(max(0.001, left), self._due)

    def _due(self) -> None:
        self._armed = False
        self.sweep()
        self._arm()
