"""The ranks' side of a store: a unix socket, one JSON object a line, a thread per connection."""

from __future__ import annotations

import contextlib
import errno
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from robust_slurm.frames import json_lines

MAX_LINE = 16 << 20
MAX_CONNECTIONS = 1024
SEND_TIMEOUT = 5  # s until a rank that does not read is disconnected
Message = dict[str, Any]


class RefusedError(Exception):
    """A rank sent an invalid message; its connection ends."""


class RankConnection:
    """One rank's connection; ``send`` and ``close`` may be called from any thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self.rank = -1
        self.epoch = 0
        self.alarms = 0
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", SEND_TIMEOUT, 0))

    def send(self, message: Message) -> None:
        """Send a message. A rank that is gone or does not read loses its connection."""
        line = json_lines.encode(message)
        try:
            with self._lock:
                self._sock.sendall(line)
        except OSError:
            self.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Release the descriptor. Called only by the thread that reads."""
        with self._lock:
            self._sock.close()

    def lines(self, take: Callable[[Message], None]) -> None:
        """Read until the end. Raises RefusedError for what is no message."""
        buffer = bytearray()
        searched = 0
        while True:
            try:
                got = self._sock.recv(1 << 16)
            except OSError:
                return
            if not got:
                return
            buffer += got
            while (end := buffer.find(b"\n", searched)) >= 0:
                take(parse(bytes(buffer[:end])))
                del buffer[: end + 1]
                searched = 0
            searched = len(buffer)
            if len(buffer) > MAX_LINE:
                raise RefusedError(f"a line of more than {MAX_LINE} bytes")


def parse(line: bytes) -> Message:
    """Parse a message. Raises RefusedError."""
    try:
        return json_lines.parse(line)
    except ValueError as err:
        raise RefusedError(str(err)) from None


def whole(message: Message, name: str, below: int = 1 << 62) -> int:
    """A whole number from 0. Raises RefusedError."""
    value = message.get(name)
    if type(value) is not int or not 0 <= value < below:
        raise RefusedError(f"{message['op']}: {name} is {value!r}"[:200])
    return value


def text(message: Message, name: str, most: int = 4096) -> str:
    """Return a text of the message. Raises RefusedError."""
    value = message.get(name, "")
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise RefusedError(f"{message['op']}: {name} is {value!r}"[:200])
    return value


def seconds(message: Message, name: str) -> float:
    value = message.get(name, 0.0)
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        return 0.0
    return float(value)


def absolute(message: Message, name: str) -> str:
    """An absolute path, or empty. Raises RefusedError."""
    path = text(message, name)
    if path and not path.startswith("/"):
        raise RefusedError(f"{message['op']}: {name} is not an absolute path: {path!r}")
    return path


class Door:
    """Accepts connections and gives every message to ``take``, which may raise RefusedError."""

    def __init__(
        self,
        take: Callable[[RankConnection, Message], None],
        gone: Callable[[RankConnection], None],
    ) -> None:
        self._take = take
        self._gone = gone
        self._lock = threading.Lock()
        self._open: dict[RankConnection, threading.Thread] = {}
        self._closed = False

    def accept(self, sock: socket.socket) -> None:
        allowed = json_lines.ours(json_lines.peer(sock)[1])
        with self._lock:
            if self._closed or not allowed or len(self._open) >= MAX_CONNECTIONS:
                sock.close()
                return
            connection = RankConnection(sock)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="ckpt-rank", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as err:  # the user has as many threads as are allowed
                connection.close()
                raise OSError(errno.EAGAIN, str(err)) from err
            self._open[connection] = thread

    def _serve(self, connection: RankConnection) -> None:
        try:
            connection.lines(lambda message: self._take(connection, message))
        except RefusedError as err:
            connection.send({"op": "refused", "why": str(err)})
        finally:
            connection.close()
            self._gone(connection)
            with self._lock:
                self._open.pop(connection, None)
            connection.release()

    def close_all(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.close()

    def stop(self) -> list[threading.Thread]:
        with self._lock:
            self._closed = True
            threads = list(self._open.values())
        self.close_all()
        return threads
