"""A node with robust-task's door to its data processes, of which each is a stand-in."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from srun_wrapper.agent.data import data_process
from srun_wrapper.agent.data.door import NAME, DataDoor
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting

PROGRAM = """
import ctypes, json, os, socket, sys, threading, time
order = json.load(sys.stdin)
with open(order["name"], "a") as file:
    print(os.getpid(), os.environ.get("RANK"), os.environ.get("OWN"), file=file)
if os.path.exists(order["name"] + ".exit"):
    sys.exit(int(open(order["name"] + ".exit").read()))
if os.path.exists(order["name"] + ".half"):
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).pthread_exit(None)
if os.path.exists(order["name"] + ".child") and not os.fork():
    time.sleep(60)
listener = socket.socket(fileno=order["listen"])
def serve(sock):
    sock.send(b"%d" % os.getpid())
    while sock.recv(100):
        while os.path.exists(order["name"] + ".busy"):
            pass
        sock.send(b"here")
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Node:
    """A door in a loop, and the ranks that ask at it."""

    def __init__(self, directory: Path) -> None:
        self.loop = Loop()
        self.directory = directory
        self.door = DataDoor(self.loop, directory, b"k" * 32)
        self.program = directory / "program.py"
        self.program.write_text(PROGRAM)

    def turn(self) -> None:
        self.loop.turn(0.01)
        starting.reaped(process_tree.reap())

    def until(self, condition: Any, what: str) -> None:
        def turned() -> bool:
            self.turn()
            return bool(condition())

        until(turned, what, 20.0, every=0.0)

    def ask(self, name: str, **more: Any) -> tuple[socket.socket, dict[str, Any]]:
        request = {
            "op": "ask", "name": str(self.directory / name), "python": sys.executable,
            "main": str(self.program), "path": sys.path, "directory": "/", "original": 2,
            "code": "", "memory": 1, "environ": {**os.environ, "RANK": "1", "OWN": "mine"}, **more,
        }  # fmt: skip
        return self.say(json.dumps(request).encode() + b"\n")

    def say(self, line: bytes) -> tuple[socket.socket, dict[str, Any]]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(str(self.directory / NAME))
        sock.setblocking(False)
        sock.send(line)
        heard = bytearray()

        def answered() -> bool:
            try:
                heard.extend(sock.recv(4096))
            except BlockingIOError:
                return False
            return True

        self.until(answered, "the answer")
        return sock, json.loads(heard)

    def pids(self, name: str) -> list[int]:
        path = self.directory / name
        lines = path.read_text().splitlines() if path.exists() else []
        assert all(line.split()[1:] == ["None", "mine"] for line in lines)
        return [int(line.split()[0]) for line in lines]

    def started(self, name: str, lives: int = 1) -> int:
        self.until(lambda: len(self.pids(name)) == lives, f"life {lives} of {name}")
        return self.pids(name)[-1]

    def served_by(self, answer: dict[str, Any]) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(answer["path"])
            return int(sock.recv(100))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.door.close()
    node.until(lambda: not starting._pending, "the end of all data processes, and of their starts")
    assert not data_process.processes()
    assert not list(tmp_path.glob("data-*"))
