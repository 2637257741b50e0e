"""A listening socket that limits the number and the time of unauthenticated connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop

HANDSHAKE_TIMEOUT = 3.0  # s
MOST = 32


class GuestLimits(NamedTuple):
    """Limits the connections that have not authenticated: how many, and for how many seconds."""

    most: int = MOST
    seconds: float = HANDSHAKE_TIMEOUT
    stay: float = 0.0
    """Seconds until any connection is closed; 0: never."""


class Guests:
    """Accepts connections; closes those that do not authenticate in time, or the oldest of many.

    Strangers can open as many connections as they like; each would cost a file descriptor.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        key: bytes,
        on_payload: Callable[[Link, bytes], None],
        on_close: Callable[[Link, str], None] = lambda _link, _reason: None,
        limits: GuestLimits = GuestLimits(),  # noqa: B008 - a tuple
    ) -> None:
        """``sock`` listens."""
        self._loop = loop
        self._sock = sock
        self._key = key
        self._calls = on_payload, on_close
        self._limits = limits
        self._links: list[Link] = []
        sock.setblocking(False)
        loop.watch(sock, lambda _mask: self._accept(), write=False)

    def _accept(self) -> None:
        peer = self._loop.accept(self._sock)
        if peer is None:
            return
        heard, closed = self._calls
        link = Link(self._loop, peer, self._key, server=True, on_payload=heard, on_close=closed)
        self.admit(link)
        if self._limits.stay:
            self._loop.later(self._limits.stay, link.close)

    def admit(self, link: Link) -> None:
        """Add an accepted connection to those that have to authenticate."""
        self._links = [each for each in self._links if not each.closed and not each.authenticated]
        while len(self._links) >= self._limits.most:
            self._links.pop(0).close("too many connections that do not authenticate")
        self._links.append(link)
        self._loop.later(self._limits.seconds, lambda: self._judge(link))

    def _judge(self, link: Link) -> None:
        if not link.authenticated:
            link.close("did not authenticate")

    def close(self) -> None:
        """Accept no more."""
        self._loop.forget(self._sock)
        self._sock.close()
