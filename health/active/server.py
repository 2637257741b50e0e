"""Workers' connections to the coordinator: frames in, JSON objects out, no meaning (asyncio).

Whoever does not prove within INTRODUCTION_S that it has the key is closed, and never heard.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

from robust_slurm.wire import Codec, WireError

INTRODUCTION_S = 10.0
# A node that loses its power closes nothing: the kernel asks after 10 s, and gives up 10 s later.
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 5),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class Link(asyncio.Protocol):
    """One connection. ``broken``: what of it was not of our protocol, once it was trusted."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._codec = Codec(server.key, server=True)
        self._transport: asyncio.Transport | None = None
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.peer = ""
        self.broken = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.peer = str((transport.get_extra_info("peername") or ("",))[0])
        sock = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            sock.setsockopt(level, option, value)
        transport.write(self._codec.preface())
        asyncio.get_running_loop().call_later(INTRODUCTION_S, self._check_introduced)
        self._server.links.add(self)

    def _check_introduced(self) -> None:
        if not self._codec.trusted:
            self.close()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._codec.feed(data):
                message = json.loads(payload)
                if not isinstance(message, dict):
                    raise ValueError("no JSON object")
                self._server.on_message(self, message)
        except (WireError, ValueError, RecursionError) as err:
            self.broken = f"it sent what is not understood: {err}"
            self.close()

    def send(self, message: dict[str, Any]) -> None:
        """Nothing is sent on a connection that is closed. ValueError: too long for a frame."""
        if self._transport is not None and not self.closed.done() and self._codec.ready:
            self._transport.write(self._codec.seal(json.dumps(message).encode()))

    def end(self, message: dict[str, Any]) -> None:
        """Say a last word and close."""
        self.send(message)
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.links.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)
        self._server.on_close(self)


class Server:
    """Listens, and hands on what trusted connections say."""

    def __init__(
        self,
        key: bytes,
        on_message: Callable[[Link, dict[str, Any]], None],
        on_close: Callable[[Link], None],
    ) -> None:
        self.key = key
        self.on_message = on_message
        self.on_close = on_close
        self.links: set[Link] = set()
        self._server: asyncio.Server | None = None

    async def open(self, host: str) -> int:
        """The port, of the kernel's choice. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Link(self), host, 0, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self, message: dict[str, Any], patience_s: float) -> None:
        """No new connections; a last word to those there are, then none."""
        if self._server is not None:
            self._server.close()
        links = list(self.links)
        for link in links:
            link.send(message)
        if links:
            await asyncio.wait([link.closed for link in links], timeout=patience_s)
        for link in list(self.links):
            link.close()
