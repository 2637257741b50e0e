"""The supervisor's side of the wire: accepts agents, hands on their messages (asyncio)."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, get_args

import msgspec

from robust_slurm.frames.admission import Strangers
from robust_slurm.frames.framed import BATCH, Framed, admission, widen
from robust_slurm.frames.wire import WireError
from srun_wrapper.protocol.messages import FromAgent, Message, PeerAsk, decode_from_agent, encode

_log = logging.getLogger("robust-srun.nodes")
HIGH_WATER = 8 << 20
HELD_UP = 0.05  # s
_KNOWN = frozenset(kind.__name__ for kind in get_args(FromAgent))
Answer = Literal["accepted", "refused", "unreachable"]


class Connection(Framed):
    """One agent's connection. ``agent`` is set by the supervisor."""

    refused = (WireError, ValueError, RecursionError)

    def __init__(
        self,
        key: bytes,
        on_message: Callable[[Connection, Message], None],
        on_close: Callable[[Connection], None],
        strangers: Strangers[Framed],
        skipped: set[str] | None = None,
    ) -> None:
        """``skipped``: kinds of messages that were logged as unknown, on any connection."""
        super().__init__(key, strangers)
        self._skipped = set() if skipped is None else skipped
        self._on_message = on_message
        self._on_close = on_close
        self.agent: object | None = None
        self.closed = False

    def prepare(self, transport: asyncio.Transport, sock: socket.socket) -> None:
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def received(self, payload: bytes) -> None:
        try:
            message = decode_from_agent(payload)
        except msgspec.ValidationError:
            if kind := _newer_kind(payload):
                self._skip(kind)
                return
            raise
        if not isinstance(message, PeerAsk):
            self._on_message(self, message)

    def _skip(self, kind: str) -> None:
        """Ignore a kind of message that only a newer robust-task sends; it is not needed here."""
        if kind not in self._skipped:
            self._skipped.add(kind)
            _log.warning(
                "the robust-task at %s is newer than this robust-srun: its messages %s are "
                "ignored; install the same version on all nodes",
                self.peer,
                kind,
            )

    def send(self, message: Message) -> None:
        if self._transport is not None and not self.closed and self._codec.ready:
            self.write(encode(message))
            if self._transport.get_write_buffer_size() > HIGH_WATER:
                self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.closed = True
        self._on_close(self)


async def listen(
    key: bytes,
    on_message: Callable[[Connection, Message], None],
    on_close: Callable[[Connection], None],
) -> tuple[asyncio.Server, int]:
    """Listen on all addresses, on a port of the kernel's choice. Returns the server and port."""
    loop = asyncio.get_running_loop()
    skipped, strangers = set[str](), admission()
    server = await loop.create_server(
        lambda: Connection(key, on_message, on_close, strangers, skipped),
        host="0.0.0.0",  # agents come from all nodes; they must prove the key
        port=0,
        backlog=BATCH,
    )
    widen(server)
    return server, int(server.sockets[0].getsockname()[1])


async def probe(host: str, port: int, timeout: float, again: Sequence[float] = ()) -> Answer:
    """Probe a silent node by a second connection.

    A live kernel answers a connection attempt at once, however busy the node's processes are.
    ``again``: s from now at which further attempts are made, beside the earlier ones, until one is
    answered; ``timeout`` is for all of them.
    """
    attempts = {asyncio.create_task(_attempt(host, port, wait)) for wait in (0.0, *again)}
    answers, end = set[Answer](), time.monotonic() + timeout
    try:
        waiting = attempts
        while waiting and not answers and (left := end - time.monotonic()) > 0:
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=FIRST_COMPLETED)
            answers = _said(done)
        if not answers and time.monotonic() > end + HELD_UP:
            # This process was held up: an answer may have come that it has not seen yet.
            done, _ = await asyncio.wait(attempts, timeout=HELD_UP)
            answers = _said(done)
    finally:
        for each in attempts:
            each.cancel()
    return min(answers, default="unreachable")  # "accepted" before "refused"


def _said(attempts: Iterable[asyncio.Task[Answer]]) -> set[Answer]:
    """Answers of the host to these attempts."""
    return {each.result() for each in attempts} - {"unreachable"}


async def _attempt(host: str, port: int, wait: float) -> Answer:
    await asyncio.sleep(wait)
    try:
        _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return "refused"
    except OSError:
        return "unreachable"
    writer.close()
    return "accepted"


def _newer_kind(payload: bytes) -> str:
    """Return the kind of an agent's message that this version does not have; "" if it is broken."""
    try:
        raw = msgspec.msgpack.decode(payload)
    except (ValueError, RecursionError):  # no text, or nested too deep
        return ""
    kind = raw[0] if isinstance(raw, list) and raw else None
    known = not isinstance(kind, str) or kind in _KNOWN or not kind.isidentifier()
    return "" if known else str(kind)
