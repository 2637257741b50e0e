"""Orders of where replicas go, and of room on idle nodes."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import checkpointed_job
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.slurm import SlurmError
from srun_wrapper.checkpoints import replicas
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
        assert said == []  # that is where they are to be, and none is there yet
        for rank in range(4):
            saves(job, rank, 1, replicated=1)
        return job

    job = asyncio.run(run())
    assert job.targets() == {
        0: (3, "n3", 8003),
        1: (2, "n2", 8002),
        2: (1, "n1", 8001),
        3: (0, "n0", 8000),
    }
    assert [line for line in said if "any 1 node, any 1" in line and "leaf switch" in line]


def saves(job: CheckpointedJob, rank: int, step: int, *, replicated: int | None) -> None:
    """The rank has saved a step, and its newest replica; if older, the step can have none."""
    message = Saved(1, rank, step, replicated, 1000, 0.0, 0.0, safe=step)
    job.checkpoints.heard(job.nodes[rank], message)


async def placed() -> CheckpointedJob:
    job = CheckpointedJob()
    for rank in range(4):
        job.enrol(rank)
    await settled(job)
    return job


def test_no_replica_is_claimed_where_no_node_has_room_for_any(said: list[str]) -> None:
    job = asyncio.run(placed())
    for rank in range(4):
        saves(job, rank, 1, replicated=None)
    (line,) = said
    assert "no replica is on another node: a lost node costs the steps since the last dur" in line
    record = job.checkpoints.record()
    assert record is not None and record["survives"].startswith("not 1 node")
    assert job.checkpoints.replicas.copies == {f"n{i}": frozenset({f"n{i}"}) for i in range(4)}


def test_what_replicas_survive_is_counted_on_those_that_are_whole(said: list[str]) -> None:
    job = asyncio.run(placed())
    for rank in range(3):
        saves(job, rank, 1, replicated=1)
    assert said == []  # that of rank 3 is on its way
    saves(job, 3, 1, replicated=None)
    (line,) = said
    assert "replicas survive the loss of" in line and "not 1 node (1 of 4)" in line


def test_a_replica_on_its_way_is_waited_for_within_bounds(said: list[str]) -> None:
    job = asyncio.run(placed())
    for rank in range(4):
        on_its_way = Saved(1, rank, 1, None, 1000, 0.0, 0.0)
        job.checkpoints.heard(job.nodes[rank], on_its_way)
    job.checkpoints.look(time.monotonic())
    assert said == []
    job.checkpoints.look(time.monotonic() + replicas.UNCONFIRMED)
    assert "no replica is on another node" in said[0]


def test_replicas_that_end_and_come_again_are_reported_if_it_lasts(said: list[str]) -> None:
    job = asyncio.run(placed())
    for rank in range(4):
        saves(job, rank, 1, replicated=1)
    assert "replicas survive the loss of any 1 node" in said.pop()
    saves(job, 0, 2, replicated=1)
    saves(job, 0, 3, replicated=3)
    job.checkpoints.look(time.monotonic() + 2 * replicas.SETTLED)
    assert said == []
    saves(job, 0, 4, replicated=3)
    job.checkpoints.look(time.monotonic() + 2 * replicas.SETTLED)
    assert "not 1 node (1 of 4)" in said[0]


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
