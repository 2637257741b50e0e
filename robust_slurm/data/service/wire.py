"""One JSON object a line on a unix socket, with descriptors where a line says so.

Both ends of the data process, and its door in robust-task. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import time
from typing import TYPE_CHECKING, Any

from robust_slurm.frames import json_lines
from robust_slurm.frames.json_lines import encode

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST = 16 << 20  # bytes of a line
SEND = 30.0  # s for the other end to read
MOST_FDS = 253  # of one message: the kernel's limit


def socket_name(*what: Any) -> str:
    """Return the name of a data process's socket. ``what`` makes it another process: a rank finds
    the socket without waiting for the door's answer."""
    text = json.dumps(what, separators=(",", ":"))
    return f"data-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}.sock"


class Closed(OSError):
    """The other end has gone, or says what is no message."""


class LineSocket:
    """One end of a connection, used by one thread. Takes the socket over."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._searched = 0
        self._fds: list[int] = []
        sock.setblocking(False)

    def send(self, message: dict[str, Any], fds: Sequence[int] = (), **encoded: str) -> None:
        """Send one message with these descriptors. ``encoded``: more of it, which is JSON already.
        Raises OSError."""
        text = encode({**message, "fds": len(fds)} if fds else message)
        more = "".join(f',"{name}":{value}' for name, value in encoded.items())
        self.send_line(text[:-2] + more.encode() + b"}\n" if more else text, fds)

    def send_line(self, encoded: bytes, fds: Sequence[int] = ()) -> None:
        """Send a message that says how many descriptors it has."""
        line = memoryview(encoded)
        until = time.monotonic() + SEND
        while line:
            try:
                if fds:
                    sent, fds = socket.send_fds(self._sock, [line], list(fds)), ()
                else:
                    sent = self._sock.send(line)
                line = line[sent:]
            except BlockingIOError:
                poll = select.poll()  # select() knows descriptors below 1024 alone
                poll.register(self._sock, select.POLLOUT)
                if not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                    raise Closed("the other end does not read") from None

    def receive(self, seconds: float | None) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its descriptors, which the caller closes; None after
        ``seconds``. Raises OSError, Closed among them."""
        until = None if seconds is None else time.monotonic() + seconds
        while (end := self._data.find(b"\n", self._searched)) < 0:
            self._searched = len(self._data)
            if len(self._data) > MOST:
                raise Closed(f"a line of more than {MOST} bytes")
            left = None if until is None else max(0.0, until - time.monotonic())
            poll = select.poll()
            poll.register(self._sock, select.POLLIN)
            if not poll.poll(None if left is None else left * 1000):
                return None
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, MOST_FDS)
            except BlockingIOError:
                continue
            self._fds += fds
            for fd in fds:  # they may stay open for long: not in programs that this one starts
                os.set_inheritable(fd, False)
            if not data:
                raise Closed("it has ended the connection")
            self._data += data
        line = bytes(self._data[:end])
        del self._data[: end + 1]
        self._searched = 0
        try:
            message = json_lines.parse(line)
        except ValueError as err:
            raise Closed(str(err)) from None
        count = message.pop("fds", 0)
        if type(count) is not int or not 0 <= count <= len(self._fds):
            raise Closed("descriptors are missing")
        fds, self._fds = self._fds[:count], self._fds[count:]
        return message, fds

    def close(self) -> None:
        """End the connection; what was sent and not taken is closed."""
        self._sock.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
