"""The supervisor, as Checkpoints sees it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_job import SentBus

from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from srun_wrapper.checkpoints import registry as module
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.protocol.checkpoint_messages import Enrolled, MakeRoom, Place, StoreReady
from srun_wrapper.protocol.messages import Hello, Message
from srun_wrapper.protocol.server import Connection
from srun_wrapper.supervisor.ending import Ending
from srun_wrapper.supervisor.roster import Node, Role, World
from srun_wrapper.supervisor.state import JobState
from srun_wrapper.supervisor.supervisor import Supervisor


class Boss:
    """The supervisor as Checkpoints sees it; four nodes of one rank each."""

    def __init__(self, topology: str | SlurmError = "", **settings: Any) -> None:
        self.config = Config(**settings)
        self.state = JobState(self.config, 12, "n0")
        self.bus = SentBus(self.state, self.obey)
        self.sent = self.bus.sent
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.told: list[str] = []
        self._topology = topology
        line = cast(Connection, SimpleNamespace(send=lambda _message: None))
        places = []
        for i in range(4):
            hello = Hello(12, "0", i, f"n{i}", (i,), 4, 4, 7000, 7001, 0, 0)
            node = Node((12, "0", i), f"n{i}", f"10.0.0.{i}", hello, line, Role.ACTIVE, 0.0, 7001)
            self.state.nodes[node.key] = node
            places.append(node)
        self.nodes = places
        self.state.world = World(0, places, [(i,) for i in range(4)])
        self.state.new_epoch()
        self.ledger = SimpleNamespace(event=lambda name, **what: self.events.append((name, what)))
        self.slurm = SimpleNamespace(topology=self._ask)
        self.step = SimpleNamespace(ended=False)
        self.launch = SimpleNamespace(command=SimpleNamespace(command=("train.py",)), env={})
        self.ending = Ending(self.state, lambda _node, _now: False)
        self.checkpoints = Checkpoints(cast(Supervisor, self))
        self.certificates = Certificates(cast(Supervisor, self))

    def _ask(self) -> str:
        if isinstance(self._topology, SlurmError):
            raise self._topology
        return self._topology

    def news(self, text: str) -> None:
        self.told.append(text)

    def obey(self, node: Node, message: Message) -> None:
        """Do what a node does when it receives a message."""

    def enrol(
        self,
        rank: int,
        mesh: dict[str, int] | None = None,
        directory: str = "",
        every: int = 0,
        needs: tuple[int, ...] = (),
    ) -> None:
        node = self.nodes[rank]
        self.checkpoints.heard(node, StoreReady(1, 0, 8000 + rank))
        epoch = self.state.world.epoch
        needs = needs or (rank,)
        said = Enrolled(2, epoch, 0, rank, 4, mesh or {}, needs, directory, every, 1000)
        self.checkpoints.heard(node, said)

    def room_orders(self) -> list[tuple[str, Message]]:
        return [(name, order) for name, order in self.sent if isinstance(order, MakeRoom)]

    def targets(self) -> dict[int, tuple[int, str, int]]:
        """Owner → holder, node and port of all Place orders."""
        return {
            owner: (t.rank, t.node, t.port) if t is not None else (-1, "", 0)
            for _, order in self.sent
            if isinstance(order, Place)
            for owner, t in order.targets.items()
        }


async def settled(boss: Boss) -> None:
    task = boss.checkpoints._placing
    assert task is not None
    await asyncio.wait_for(task, 10)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(module, "say", lines.append)
    return lines
