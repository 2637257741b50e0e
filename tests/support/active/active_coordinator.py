"""A coordinator for workers of active tests, as small as can be: blocking sockets, one thread."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from places import REPOSITORY

from robust_slurm import commands
from robust_slurm.frames.wire import Codec

DEADLINE_S = 120.0  # an import of torch on a busy machine


class Peer:
    """One worker that has connected."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        connection.settimeout(DEADLINE_S)
        self.socket = connection
        self._codec = Codec(key, server=True)
        self._got: list[bytes] = []
        self._ids = 0
        connection.sendall(self._codec.preface())

    def next(self) -> dict[str, Any]:
        while not self._got:
            data = self.socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._got += self._codec.feed(data)
        return dict(json.loads(self._got.pop(0)))

    def send(self, message: Mapping[str, Any]) -> None:
        self.socket.sendall(self._codec.seal(json.dumps(message).encode()))

    def begin(self, **task: Any) -> None:
        self._ids += 1
        self.send({"id": self._ids, **task})

    def answer(self) -> dict[str, Any]:
        answer = self.next()
        assert answer["id"] == self._ids
        return answer

    def ask(self, **task: Any) -> dict[str, Any]:
        self.begin(**task)
        return self.answer()


class Coordinator:
    """Starts workers and takes their connections; ends them with itself."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(DEADLINE_S)
        self.workers: list[subprocess.Popen[bytes]] = []
        self.peers: list[Peer] = []

    def env(self, node: str) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "ROBUST_TEST_SERVER": f"127.0.0.1:{self._server.getsockname()[1]}",
            "ROBUST_TEST_KEY": self.key.hex(),
            "ROBUST_TEST_NODE": node,
        }

    def start(self, node: str, **env: str) -> subprocess.Popen[bytes]:
        worker = subprocess.Popen(
            [sys.executable, "-P", *commands.words("health.active.worker.main")],
            env=self.env(node) | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.workers.append(worker)
        return worker

    def accept(self) -> Peer:
        connection, _ = self._server.accept()
        self.peers.append(Peer(connection, self.key))
        return self.peers[-1]

    def worker(self, node: str, **env: str) -> Peer:
        """Start one and wait until it is ready."""
        self.start(node, **env)
        peer = self.accept()
        assert peer.next()["hello"]["node"] == node
        assert "ready" in peer.next()
        return peer

    def close(self) -> None:
        for peer in self.peers:
            peer.socket.close()
        self._server.close()
        for worker in self.workers:
            worker.kill()
            worker.communicate()
