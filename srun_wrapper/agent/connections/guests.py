"""Connections that have not authenticated yet: few at a time, and not for long."""

from __future__ import annotations

from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop

HANDSHAKE_TIMEOUT = 3.0  # s
MOST = 32


class Guests:
    """Closes connections that do not authenticate in time, and the oldest when there are many.

    Strangers can open as many connections as they like; each would cost a file descriptor.
    """

    def __init__(self, loop: Loop, most: int = MOST, seconds: float = HANDSHAKE_TIMEOUT) -> None:
        self._seconds = seconds
        self._loop = loop
        self._most = most
        self._links: list[Link] = []

    def admit(self, link: Link) -> None:
        """A connection was accepted."""
        self._links = [each for each in self._links if not each.closed and not each.ready_once]
        while len(self._links) >= self._most:
            self._links.pop(0).close("too many connections that do not authenticate")
        self._links.append(link)
        self._loop.later(self._seconds, lambda: self._judge(link))

    def _judge(self, link: Link) -> None:
        if not link.ready_once:
            link.close("did not authenticate")
