"""The accepting end of a connection of authenticated frames (asyncio); see ``wire``."""

from __future__ import annotations

import asyncio
import resource
import socket
from abc import ABC, abstractmethod

from robust_slurm.frames.admission import Strangers
from robust_slurm.frames.wire import Codec, WireError

INTRODUCTION = 10.0  # s for a new connection to prove that it has the key
STRANGERS = 1024
"""Connections that have not proved it: all agents of a job may come at once. They are at most a
quarter of the process's files."""
QUEUE = 4096  # connections that wait to be accepted
BATCH = 64  # that are accepted before those that are open are read again


def admission() -> Strangers[Framed]:
    """Return the admission of one listener of the running loop, for all of its connections."""
    later = asyncio.get_running_loop().call_later
    most = min(STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
    return Strangers(lambda one, _why: one.close(), most, INTRODUCTION, later)


def widen(server: asyncio.Server) -> None:
    """Let QUEUE connections wait for a server that was made with a ``backlog`` of BATCH.

    asyncio accepts as many at once as may wait: none of them would have been read, and the first
    would give way to the last.
    """
    for each in server.sockets:
        with socket.fromfd(each.fileno(), each.family, each.type) as same:
            same.listen(QUEUE)


class Framed(asyncio.Protocol, ABC):
    """Connection that is closed unless the peer proves within INTRODUCTION that it has the key,
    or when it is the oldest of more than STRANGERS that have not.

    Nothing is processed before the proof. ``peer``: its address. ``received`` is called with
    each payload. ``refused``: the exceptions for a bad frame, and of ``received`` for a payload
    that it does not understand; they close the connection.
    """

    refused: tuple[type[Exception], ...] = (WireError,)

    def __init__(self, key: bytes, admission: Strangers[Framed]) -> None:
        """``admission``: that of its listener."""
        self._codec = Codec(key, server=True)
        self._admission = admission
        self._transport: asyncio.Transport | None = None
        self.peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0]).removeprefix("::ffff:")
        sock: socket.socket = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.prepare(transport, sock)
        transport.write(self._codec.preface())
        self._admission.enter(self)

    def data_received(self, data: bytes) -> None:
        try:
            payloads = self._codec.feed(data)
            if payloads:
                self._admission.leave(self)
            for payload in payloads:
                self.received(payload)
        except self.refused as err:
            self.misunderstood(err)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._admission.leave(self)

    def write(self, payload: bytes) -> None:
        """Send one frame, if the peer has introduced itself. ValueError: too long for a frame."""
        if self._transport is None or self._transport.is_closing():
            return  # asyncio would print a warning on stderr about a write to a lost connection
        if self._codec.ready:
            self._transport.write(self._codec.seal(payload))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # -- for subclasses to define

    def prepare(self, transport: asyncio.Transport, sock: socket.socket) -> None:
        """Set options of the socket and limits, before the first byte."""

    @abstractmethod
    def received(self, payload: bytes) -> None:
        """Process one payload of a peer that has proved that it has the key."""

    def misunderstood(self, err: Exception) -> None:
        """Handle a frame that is not ours, or was refused."""
