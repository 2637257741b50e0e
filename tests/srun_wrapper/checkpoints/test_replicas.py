"""Orders of where replicas go, and of room on idle nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import checkpointed_job
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.slurm import SlurmError
from srun_wrapper.job.model import Node, Role
from srun_wrapper.protocol.checkpoint_messages import (
    MakeRoom,
    Saved,
    StoreReady,
)
from srun_wrapper.protocol.messages import Message
from srun_wrapper.protocol.server import Connection

said = checkpointed_job.said
TREE = """\
SwitchName=s0 Level=0 LinkSpeed=1 Nodes=n[0-1]
SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[2-3]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[0-3] Switches=s[0-1]
"""


def test_replicas_go_outside_the_groups_and_switches_of_their_owner(said: list[str]) -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob(TREE)
        for rank in range(3):
            job.enrol(rank, {"dp": 2, "pp": 2})
        assert job.checkpoints.replicas._placing is None  # one is missing
        job.enrol(3, {"dp": 2, "pp": 2})
        await settled(job)
        return job

    job = asyncio.run(run())
    assert job.targets() == {
        0: (3, "n3", 8003),
        1: (2, "n2", 8002),
        2: (1, "n1", 8001),
        3: (0, "n0", 8000),
    }
    assert [line for line in said if "any 1 node, any 1" in line and "leaf switch" in line]


def test_a_slurm_that_does_not_answer_only_costs_the_switches(said: list[str]) -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob(SlurmError("timeout", ("scontrol",), "no answer"))
        for rank in range(4):
            job.enrol(rank)
        await settled(job)
        return job

    job = asyncio.run(run())
    assert all(owner != holder for owner, (holder, _, _) in job.targets().items())
    assert any("no topology" in text for text in job.told)
    assert not any("leaf" in line for line in said)


def test_nodes_that_wait_are_told_once_to_make_room_for_what_a_node_would_fetch() -> None:
    job = CheckpointedJob()
    line = cast(Connection, SimpleNamespace(send=lambda _message: None))
    spare, gone = (
        Node((12, "0", i), f"n{i}", f"10.0.0.{i}", job.nodes[0].hello, line, role, 0.0, 7001)
        for i, role in ((4, Role.SPARE), (5, Role.DEAD))
    )
    for node in (spare, gone):
        job.state.members.join(node)
        job.checkpoints.heard(node, StoreReady(1, 0, 8009))

    async def run() -> list[tuple[str, Message]]:
        for rank in range(4):
            job.enrol(rank, needs=(rank, rank ^ 1))
        await settled(job)
        for rank in range(4):
            job.checkpoints.look(1000.0)
            assert job.room_orders() == []  # sizes are not known yet
            saved = Saved(1, rank, 20, 20, 5000 + rank, 0.0, 0.0)
            job.checkpoints.heard(job.nodes[rank], saved)
        job.checkpoints.look(1001.0)
        job.checkpoints.look(1002.0)
        return job.room_orders()

    assert asyncio.run(run()) == [("n4", MakeRoom(5003, 2))]
