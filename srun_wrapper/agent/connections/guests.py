"""A listening socket that limits the number and the time of unauthenticated connections."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from robust_slurm.frames.admission import Strangers
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
        self._admission: Strangers[Link] = Strangers(
            lambda link, why: link.close(why), limits.most, limits.seconds, loop.later
        )
        sock.setblocking(False)
        loop.watch(sock, lambda _mask: self._accept(), write=False)

    def _accept(self) -> None:
        peer = self._loop.accept(self._sock)
        if peer is None:
            return
        link = Link(
            self._loop,
            peer,
            self._key,
            server=True,
            on_payload=self._heard,
            on_close=self._closed,
        )
        self.admit(link)

    def admit(self, link: Link) -> None:
        """Add an accepted connection to those that have to authenticate."""
        self._admission.enter(link)
        if self._limits.stay:
            self._loop.later(self._limits.stay, link.close)

    def _heard(self, link: Link, payload: bytes) -> None:
        self._admission.leave(link)
        self._calls[0](link, payload)

    def _closed(self, link: Link, reason: str) -> None:
        self._admission.leave(link)
        self._calls[1](link, reason)

    def close(self) -> None:
        """Accept no more."""
        self._loop.forget(self._sock)
        self._sock.close()
