"""The data process's end of its connection to one reader."""

from __future__ import annotations

import os
import socket
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError
from robust_slurm.data.service import wire

if TYPE_CHECKING:
    from collections.abc import Callable

    Answers = Future[tuple[dict[str, Any], bytes]]


class ReaderGone(DataError):
    """The reader has died, or is not to go on. What was asked can be asked of another."""


class ReaderChannel:
    """Asks one reader, and takes its answers in a thread. Any thread may call it.

    ``gone`` is called once, when the reader has gone, with the lanes that it was reading, and
    before those who wait for an answer get their error.
    """

    def __init__(
        self, sock: socket.socket, serial: int, gone: Callable[[ReaderChannel, list[int]], None]
    ) -> None:
        self.serial = serial
        self._line = wire.LineSocket(sock)
        self._sock = sock
        self._gone = gone
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._over = False
        self._asked: dict[int, tuple[Answers, int]] = {}
        self._ids = 0
        threading.Thread(target=self._receive, name="data-reader", daemon=True).start()

    def ask(self, message: dict[str, Any], lane: int) -> Answers:
        """Ask for a window of a lane, by the lane's number."""
        answer: Answers = Future()
        with self._lock:
            if self._over:
                answer.set_exception(ReaderGone("it has ended"))
                return answer
            self._ids += 1
            self._asked[self._ids] = answer, lane
            message = {**message, "id": self._ids}
        self.tell(message)
        return answer

    def tell(self, message: dict[str, Any]) -> None:
        """Send a message; the channel ends if that fails."""
        try:
            with self._sending:
                self._line.send(message)
        except OSError:
            self.close()

    def reads(self, lane: int) -> bool:
        """Return whether it has been asked for a window of this lane."""
        with self._lock:
            return any(asked == lane for _, asked in self._asked.values())

    def close(self) -> None:
        """Take no more answers."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has gone

    def _receive(self) -> None:
        try:
            while True:
                message, fds = self._line.receive(None) or ({}, [])
                body = b"".join(map(_content, fds))
                with self._lock:
                    answer, _ = self._asked.pop(message["id"])
                answer.set_result((message, body))
        except Exception:  # noqa: BLE001 - nonsense, or no memory: who waits asks another
            pass
        with self._lock:
            self._over = True
            asked = list(self._asked.values())
            self._asked.clear()
        with self._sending:
            self._line.close()
        self._gone(self, [lane for _, lane in asked])
        for answer, _ in asked:
            answer.set_exception(ReaderGone("it has ended"))


def _content(fd: int) -> bytes:
    """Return what is in a file, and close it."""
    try:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)
