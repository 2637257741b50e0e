"""A job with checkpoints whose nodes do what a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from made_job import KeptJournal, SentBus, made_launch, made_node

from robust_slurm.config import Config
from robust_slurm.slurm import SlurmError
from srun_wrapper.checkpoints import (
    flushing,
    on_disk,
    registry,
    replicas,
    restoring,
    schedule,
)
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.job.model import Node
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.protocol.checkpoint_messages import Enrolled, MakeRoom, ReplicaTargets, StoreReady
from srun_wrapper.protocol.messages import Message
from srun_wrapper.supervisor.step.ending import Ending


class CheckpointedJob:
    """A job with checkpoints: real parts around a bus and a journal that keep what they get.

    Four nodes of one rank each.
    """

    def __init__(self, topology: str | SlurmError = "", **settings: Any) -> None:
        self.state = state = JobState(Config(**settings), 12, "n0")
        self.bus = SentBus(state, self.obey)
        self.sent = self.bus.sent
        self.journal = journal = KeptJournal()
        self.events, self.told = journal.events, journal.told
        self.nodes = [made_node(i) for i in range(4)]
        state.members.nodes |= {node.key: node for node in self.nodes}
        state.members.lay_out(list(self.nodes), [(i,) for i in range(4)])
        state.new_epoch()
        self._text = topology
        self.topology = Topology(
            state.members, state.config, made_launch("train.py"), journal, self._read, dict
        )
        self.checkpoints = Checkpoints(state, journal, self._leaves)
        self.enrolments = self.checkpoints.enrolments
        self.certificates = self.checkpoints.certificates
        ending = Ending(state, lambda _node, _now: False)
        self.stores = Stores(state, self.enrolments, journal, ending.answers)
        parts = (state, self.enrolments, self.certificates, self.stores)
        self.restoring = Restoring(*parts, journal)
        self.flushing = Flushing(*parts, lambda: False)

    def _read(self) -> str:
        if isinstance(self._text, SlurmError):
            raise self._text
        return self._text

    async def _leaves(self) -> Mapping[str, str]:
        self.topology.learn()
        return await self.topology.leaves()

    def obey(self, node: Node, message: Message) -> None:
        """Do what a node does when it receives a message."""

    def enrol(
        self,
        rank: int,
        mesh: dict[str, int] | None = None,
        directory: str = "",
        every: int = 0,
        needs: tuple[int, ...] = (),
        **more: Any,
    ) -> None:
        node = self.nodes[rank]
        self.checkpoints.heard(node, StoreReady(1, 0, 8000 + rank))
        epoch = self.state.world.epoch
        needs = needs or (rank,)
        said = Enrolled(2, epoch, 0, rank, 4, mesh or {}, needs, directory, every, 1000, **more)
        self.checkpoints.heard(node, said)

    def room_orders(self) -> list[tuple[str, Message]]:
        return [(name, order) for name, order in self.sent if isinstance(order, MakeRoom)]

    def targets(self) -> dict[int, tuple[int, str, int]]:
        """Owner → holder, node and port of all Place orders."""
        return {
            owner: (t.rank, t.node, t.port) if t is not None else (-1, "", 0)
            for _, order in self.sent
            if isinstance(order, ReplicaTargets)
            for owner, t in order.targets.items()
        }


async def settled(job: CheckpointedJob) -> None:
    task = job.checkpoints.replicas._placing
    assert task is not None
    await asyncio.wait_for(task, 10)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    for module in (flushing, on_disk, registry, replicas, restoring, schedule):
        monkeypatch.setattr(module, "say", lines.append)
    return lines
