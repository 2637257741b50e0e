"""A store for tests of the rank's side: speaks the socket's protocol, keeps and digests nothing."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any


class FakeStore:
    """Answers each message as told in ``answers`` (op → list of replies), or not at all."""

    def __init__(self, directory: Path, **welcome: Any) -> None:
        directory.mkdir(exist_ok=True)
        self.welcome = {"restore": None, "own": [], "directory": str(directory), **welcome}
        self.path = directory / "fake.sock"
        self.messages: list[dict[str, Any]] = []
        self.held: list[int] = []
        self.keeps = True
        """Answer ``saved`` with ``kept``."""
        self.replicates = True
        """Answer ``saved`` with ``alone``."""
        self.waits = 0
        """The number of times that it asks a rank to wait before it welcomes it."""
        self.arrived = threading.Condition()
        self.over = threading.Event()
        """Set once everything that a rank sent before it closed its connection has been read."""
        self._connection: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(self.path))
        self._listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def tell(self, op: str, **fields: Any) -> None:
        """Send to the rank that is connected."""
        assert self._connection is not None
        self._connection.sendall(json.dumps({"op": op, **fields}).encode() + b"\n")

    def said(self, op: str) -> list[dict[str, Any]]:
        with self.arrived:
            return [m for m in self.messages if m["op"] == op]

    def wait(self, op: str, count: int = 1, timeout: float = 20.0) -> list[dict[str, Any]]:
        with self.arrived:
            assert self.arrived.wait_for(lambda: len(self.said_now(op)) >= count, timeout), op
            return self.said_now(op)

    def said_now(self, op: str) -> list[dict[str, Any]]:
        return [m for m in self.messages if m["op"] == op]

    def die(self) -> None:
        """End like a killed robust-task."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # close() would not wake accept()
        except OSError:
            pass
        self._listener.close()
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the rank closed it

    def _serve(self) -> None:
        while True:
            try:
                self._connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=[self._connection], daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        try:
            for line in connection.makefile("rb"):
                message = json.loads(line)
                with self.arrived:
                    self.messages.append(message)
                    self.arrived.notify_all()
                try:
                    self._answer(message)
                except OSError:
                    pass  # the rank closed it; what it said before is still read
        except OSError:
            pass
        self.over.set()

    def _answer(self, message: dict[str, Any]) -> None:
        op, step = message["op"], message.get("step")
        if op == "enrol":
            for _ in range(self.waits):
                self.tell("wait")
            self.tell("welcome", **self.welcome)
        if op == "saved" and self.keeps:
            self.tell("kept", step=step, held=self.held)
        if op == "saved" and self.replicates:
            self.tell("alone", step=step)
        if op == "flush":
            self.tell("flushed", step=step, ok=True, why="")
