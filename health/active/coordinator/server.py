"""Workers' connections to the coordinator: JSON objects in frames, not interpreted (asyncio)."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from robust_slurm.frames.admission import Strangers
from robust_slurm.frames.framed import BATCH, Framed, admission, widen
from robust_slurm.frames.wire import WireError

# A node that loses its power closes nothing: the kernel asks after 10 s, and gives up 10 s later.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
)


class WorkerLink(Framed):
    """One connection. ``broken``: the invalid message that it sent after it authenticated."""

    refused = (WireError, ValueError, RecursionError)

    def __init__(self, server: Server, strangers: Strangers[Framed]) -> None:
        super().__init__(server.key, strangers)
        self._server = server
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.broken = ""

    def prepare(self, transport: asyncio.Transport, sock: socket.socket) -> None:
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)
        self._server.links.add(self)

    def received(self, payload: bytes) -> None:
        message = json.loads(payload)
        if not isinstance(message, dict):
            raise ValueError("not a JSON object")
        self._server.on_message(self, message)

    def misunderstood(self, err: Exception) -> None:
        self.broken = f"invalid message: {err}"

    def send(self, message: dict[str, Any]) -> None:
        """Send, unless the connection is closed. ValueError: too long for a frame."""
        if not self.closed.done():
            self.write(json.dumps(message).encode())

    def end(self, message: dict[str, Any]) -> None:
        """Send a last message and close."""
        self.send(message)
        if self._transport is not None:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._server.links.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        self._server.on_close(self)


class Server:
    """Listens, and passes on the messages of authenticated connections."""

    def __init__(
        self,
        key: bytes,
        on_message: Callable[[WorkerLink, dict[str, Any]], None],
        on_close: Callable[[WorkerLink], None],
    ) -> None:
        self.key = key
        self.on_message = on_message
        self.on_close = on_close
        self.links: set[WorkerLink] = set()
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """Listen on a free port and return it. Raises OSError."""
        loop = asyncio.get_running_loop()
        strangers = admission()
        self._server = await loop.create_server(
            lambda: WorkerLink(self, strangers), host, 0, backlog=BATCH
        )
        widen(self._server)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, message: dict[str, Any], patience_s: float) -> None:
        """Stop listening; send each connection a last message and close what stays open."""
        if self._server is not None:
            self._server.close()
        links = list(self.links)
        for link in links:
            link.send(message)
        if links:
            await asyncio.wait([link.closed for link in links], timeout=patience_s)
        for link in list(self.links):
            link.close()
