"""The data process and its ranks in one process: a plan whose steps say their number."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from robust_slurm.data.errors import DataError
from robust_slurm.data.service import client, server, wire
from robust_slurm.data.service.client import NodeSteps
from robust_slurm.data.service.producer import Producer
from robust_slurm.data.service.ring import StepRing
from robust_slurm.resizing.world import TrainingWorld


class Counting:
    """A plan whose step n has the number n in its rows; and its steps."""

    def __init__(self) -> None:
        self.built: list[list[int]] = []
        self.sought: list[Any] = []
        self.raises: dict[int, Exception] = {}
        self.numbers: list[int] = []  # steps that were made

    def shares(self, rank: int, world: int, original: int) -> tuple[int, ...]:
        assert original == 2
        if world not in (1, 2):
            raise DataError(f"the mesh does not fit {world} ranks")
        return (rank,) if world == 2 else (0, 1)

    def steps(self, shares: Collection[int]) -> Counting:
        self.built.append(sorted(shares))
        self._shares, self._at = sorted(shares), 0
        return self

    def seek(self, state: Any) -> None:
        self.sought.append(state)
        self._at = state["step"] if state else 0

    def next(self) -> tuple[int, dict[int, dict[str, Any]], Any]:
        number = self._at
        if number in self.raises:
            raise self.raises[number]
        self._at += 1
        self.numbers.append(number)
        rows = {share: {"x": np.full((2, 3), 10 * number + share)} for share in self._shares}
        return number, rows, {"step": self._at}

    def identity(self) -> dict[str, Any]:
        return {"seed": 7, "sources": {"web": {"files": "a"}}}

    def close(self) -> None:
        pass


class Node:
    """A node's door and data process; ``lives``: how many data processes there have been."""

    def __init__(self, directory: Path, plan: Any, answer: dict[str, Any] | None = None) -> None:
        self.plan = plan
        self.path = directory / "1.sock"
        self.answer = answer or {"op": "here", "path": str(self.path)}
        self._door = self._listen(directory / client.DOOR)
        threading.Thread(target=self._doorman, daemon=True).start()
        self.live()

    def live(self) -> None:
        self.producer = Producer(StepRing())
        self._listener = self._listen(self.path)
        self.server = server.RankServer(self._listener, self.producer)
        load = lambda: self.plan if isinstance(self.plan, Counting) else self.plan()  # noqa: E731
        self.run = threading.Thread(target=self.producer.run, args=(load,), daemon=True)
        self.run.start()

    def die(self) -> None:
        self.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        for line in list(self.server._lines):
            with contextlib.suppress(OSError):  # its rank has left
                line._sock.shutdown(socket.SHUT_RDWR)
        self.path.unlink()

    def _listen(self, path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(str(path))
        sock.listen()
        return sock

    def _doorman(self) -> None:
        self._kept = []
        while True:
            line = wire.LineSocket(self._door.accept()[0])
            with contextlib.suppress(OSError):
                assert line.receive(5)
                line.send(self.answer)
            self._kept.append(line)

    def close(self) -> None:
        """Stop, and close the steps as a process's end does: thousands would be left open."""
        self.producer.close()
        self.run.join(1.0)  # it may make one step more, and in some tests its source hangs
        ring = self.producer._ring
        with self.producer._change:
            left, ring._made, ring._served = ring._made, [], 0
            for made in left:
                made.close()


def rank(number: int = 0, world: int = 2) -> NodeSteps:
    return NodeSteps("some:plan", TrainingWorld(number, world, 2))


def take(steps: NodeSteps, count: int) -> list[int]:
    return [steps.next()[0] for _ in range(count)]
