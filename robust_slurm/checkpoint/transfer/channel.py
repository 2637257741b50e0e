"""One authenticated connection between two stores: sealed JSON messages, bulk data between them.

A channel blocks and belongs to one thread; others may only call ``close``, which wakes that thread.
Time-outs are the kernel's (SO_RCVTIMEO, SO_SNDTIMEO), so that a system call moves all that it can.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from robust_slurm.checkpoint.format.digest import FileChangedError
from robust_slurm.frames.wire import MAC, MAX_FRAME, PREFACE, Codec, WireError

HEAD = 4 + MAC
Message = dict[str, Any]


class BrokenError(Exception):
    """The connection ended, stood still for too long, or the peer broke the protocol."""


class NotListeningError(BrokenError):
    """No process listens at that address."""


class Channel:
    """``idle``: seconds without one byte moving until the connection counts as broken.

    ``first``: the payload by which the peer has already proved that it has the key.
    """

    def __init__(
        self, sock: socket.socket, codec: Codec, *, idle: float, first: bytes | None = None
    ) -> None:
        self._sock = sock
        self._codec = codec
        self._first = first
        self._idle = idle
        self._receive_timeout = -1.0
        self.closed = False
        self.give_up_at = float("inf")  # monotonic: bulk data that comes later is not waited for
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(idle))

    def greet(self) -> None:
        """Exchange prefaces. Raises BrokenError."""
        self._send(self._codec.preface())
        self._feed(self._exactly(PREFACE, time.monotonic() + self._idle))

    def send(self, message: Message) -> None:
        """Send a message. Raises BrokenError."""
        try:
            sealed = self._codec.seal(json.dumps(message, separators=(",", ":")).encode())
        except (WireError, ValueError) as err:
            raise BrokenError(str(err)) from None
        self._send(sealed)

    def receive(self, *, forever: bool = False) -> Message:
        """The next message; wait without limit for its first byte if ``forever``.

        ``busy`` messages only say that the other end is alive. Raises BrokenError, also for what
        is no message of ours.
        """
        while (message := self._receive(forever))["op"] == "busy":
            pass
        return message

    def _receive(self, forever: bool) -> Message:
        if self._first is not None:
            first, self._first = self._first, None
            return _message(first)
        if forever:
            self._wait_forever()
        deadline = time.monotonic() + self._idle
        head = self._exactly(HEAD, deadline)
        (length,) = struct.unpack(">I", head[:4])
        payloads = self._feed(head)
        if length and not payloads:
            if length > MAX_FRAME:  # the codec has refused it already
                raise BrokenError(f"frame of {length} bytes")
            payloads = self._feed(self._exactly(length, deadline))
        return _message(payloads[0] if payloads else b"")

    def send_file(
        self, fd: int, offset: int, count: int, pace: Callable[[int], int] | None = None
    ) -> None:
        """Send bytes of a file without copying them.

        ``pace(left)`` waits as long as it must and returns how many bytes may go now. Raises
        BrokenError; FileChangedError when the file is shorter.
        """
        while count:
            piece = count if pace is None else min(count, pace(count))
            sent = self._call(partial(os.sendfile, self._sock.fileno(), fd, offset, piece))
            if not sent:
                raise FileChangedError(f"the file ends at byte {offset}")
            offset += sent
            count -= sent

    def receive_into(self, view: memoryview) -> None:
        """Fill a buffer. Raises BrokenError."""
        self._set_receive_timeout(self._idle)
        while len(view):
            if time.monotonic() >= self.give_up_at:
                raise BrokenError("the time for it is over")
            got = self._call(partial(self._sock.recv_into, view, 0, socket.MSG_WAITALL))
            if not got:
                raise BrokenError("the peer closed the connection")
            view = view[got:]

    def close(self) -> None:
        """End it; a thread that is waiting in it gets BrokenError."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Give the descriptor back; only by the thread that uses the channel."""
        self.close()
        self._sock.close()

    # -- inside

    def _call(self, call: Callable[[], int]) -> int:
        try:
            return call()
        except (BlockingIOError, TimeoutError):
            raise BrokenError(f"nothing moved for {self._idle:g} s") from None
        except OSError as err:
            raise BrokenError("closed" if self.closed else str(err.strerror or err)) from None

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._call(partial(self._sock.send, view)) :]

    def _set_receive_timeout(self, seconds: float) -> None:
        if seconds != self._receive_timeout:
            try:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
            except OSError as err:
                raise BrokenError(str(err.strerror)) from None
            self._receive_timeout = seconds

    def _wait_forever(self) -> None:
        self._set_receive_timeout(0.0)  # 0: no limit
        if not self._call(partial(self._sock.recv_into, bytearray(1), 1, socket.MSG_PEEK)):
            raise BrokenError("the peer closed the connection")

    def _exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while len(view):
            left = deadline - time.monotonic()
            if left <= 0:
                raise BrokenError(f"no whole message in {self._idle:g} s")
            self._set_receive_timeout(max(left, 0.001))
            got = self._call(partial(self._sock.recv_into, view))
            if not got:
                raise BrokenError("the peer closed the connection")
            view = view[got:]
        return bytes(data)

    def _feed(self, data: bytes) -> list[bytes]:
        try:
            return self._codec.feed(data)
        except WireError as err:
            raise BrokenError(str(err)) from None


def _message(payload: bytes) -> Message:
    """Read a payload. Raises BrokenError for what is no message of ours."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("op"), str):
        raise BrokenError("a message that is not understood")
    return message


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1_000_000))


def connect(
    host: str,
    port: int,
    key: bytes,
    idle: float,
    opened: Callable[[Channel], None] = lambda _channel: None,
) -> Channel:
    """Connect and authenticate. ``opened`` gets the channel before that. Raises BrokenError."""
    try:
        sock = socket.create_connection((host, port), timeout=idle)
    except ConnectionRefusedError:
        raise NotListeningError("no process listens there") from None
    except (OSError, UnicodeError, OverflowError) as err:
        raise BrokenError(getattr(err, "strerror", None) or str(err) or "cannot connect") from None
    channel = Channel(sock, Codec(key, server=False), idle=idle)
    opened(channel)
    try:
        channel.greet()
    except BrokenError:
        channel.release()
        raise
    return channel


def numbers(message: Message, *names: str) -> list[int]:
    """Whole numbers from 0 to 2**62 of a message. Raises BrokenError."""
    values = [message.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if type(value) is not int or not 0 <= value < 1 << 62:
            raise BrokenError(f"{message.get('op')}: {name} is {value!r}"[:200])
    return [int(value) for value in values if value is not None]


def number_list(message: Message, name: str, most: int, below: int) -> list[int]:
    """A list of at most ``most`` whole numbers from 0 to ``below`` - 1. Raises BrokenError."""
    values = message.get(name)
    if (
        not isinstance(values, list)
        or len(values) > most
        or not all(type(v) is int and 0 <= v < below for v in values)
    ):
        raise BrokenError(f"{message.get('op')}: {name} is {values!r}"[:200])
    return values
