"""The supervisor's view of checkpoints: who enrolled, where replicas go, when to persist."""

from __future__ import annotations

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import cast

import checkpointed_job
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.checkpoint.planning.interval import Cost
from robust_slurm.slurm import SlurmError
from srun_wrapper.checkpoints import registry as module
from srun_wrapper.checkpoints import schedule
from srun_wrapper.protocol.checkpoint_messages import (
    Alarm,
    Committed,
    Complete,
    Enrolled,
    MakeRoom,
    PersistAt,
    Persisted,
    Saved,
    SaveEvery,
    StoreReady,
    Unshare,
)
from srun_wrapper.protocol.messages import Message
from srun_wrapper.protocol.server import Connection
from srun_wrapper.supervisor.alarms import COUNT_AFTER
from srun_wrapper.supervisor.roster import Node, Role

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


def test_ranks_of_another_epoch_or_of_a_lost_node_are_not_heard(said: list[str]) -> None:
    job = CheckpointedJob()
    late = Enrolled(1, 7, 0, 0, 4, {}, (0,), "", 0, 1)
    job.checkpoints.heard(job.nodes[0], late)
    assert not job.enrolments.ranks
    stranger = Node((13, "0", 0), "s1", "10.0.0.9", job.nodes[0].hello, None, Role.DEAD, 0.0, 7001)
    job.checkpoints.heard(stranger, Enrolled(1, 1, 0, 0, 4, {}, (0,), "", 0, 1))
    assert not job.enrolments.ranks


def test_the_same_alarm_of_many_ranks_is_said_and_recorded_once(
    said: list[str],
) -> None:
    job = CheckpointedJob()
    for rank in range(4):
        job.checkpoints.heard(job.nodes[rank], Alarm(rank + 1, rank, "/dev/shm is full"))
    assert len([line for line in said if "/dev/shm is full" in line]) == 1
    assert len([name for name, _ in job.events if name == "checkpoint_alarm"]) == 1


def test_an_alarm_with_step_and_file_is_one_line_and_a_count(said: list[str]) -> None:
    job = CheckpointedJob()
    for rank in range(4):
        for step in range(9):
            text = f"own-{rank}-{step % 3}.safetensors of step {step} could not be used: torn"
            job.checkpoints.heard(job.nodes[rank], Alarm(9 * rank + step, rank, text))
    (line,) = said
    assert line.endswith("rank 0 on n0: own-0-0.safetensors of step 0 could not be used: torn")
    job.checkpoints.look(time.monotonic())
    assert len(said) == 1
    job.checkpoints.look(time.monotonic() + COUNT_AFTER)
    job.checkpoints.look(time.monotonic() + 9 * COUNT_AFTER)
    assert said[1:] == [
        "checkpoints: … and 3 more ranks: own-0-0.safetensors of step 0 could not be used: torn"
    ]
    assert len([name for name, _ in job.events if name == "checkpoint_alarm"]) == 1


def test_steps_that_are_not_written_for_one_reason_are_said_once(said: list[str]) -> None:
    job = CheckpointedJob()
    for number, step in enumerate((10, 20, 30)):
        job.checkpoints.heard(
            job.nodes[1], Persisted(number, 1, step, False, "passed over: busy", 0.0)
        )
    assert [line for line in said if "step 10 not on disk: passed over: busy" in line] == said
    recorded = [what["text"] for name, what in job.events if name == "checkpoint_alarm"]
    assert len(recorded) == 1 and "step 10 not on disk" in recorded[0]


def test_a_step_that_a_newer_one_on_disk_replaces_is_no_loss(said: list[str]) -> None:
    job = CheckpointedJob()
    job.checkpoints.heard(job.nodes[0], Committed(1, 10, False, "no part of rank 1"))
    job.checkpoints.heard(job.nodes[0], Committed(2, 20, True, ""))
    job.checkpoints.heard(job.nodes[0], Committed(3, 15, False, "the store is closing"))
    assert said == ["no durable checkpoint of step 10: no part of rank 1"]


def test_a_durable_checkpoint_by_time_is_ordered_ahead_of_all_ranks() -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob(checkpoint_minutes=10.0)
        for rank in range(4):
            job.enrol(rank, directory="/ckpt")
            job.checkpoints.heard(
                job.nodes[rank], Saved(1, rank, 20 + rank % 2, 20, 1000, 0.0, 0.0)
            )
        await settled(job)
        return job

    job = asyncio.run(run())
    now = 1000.0
    job.checkpoints.look(now)
    job.checkpoints.look(now + 599)
    assert not [m for _, m in job.sent if isinstance(m, PersistAt)]
    job.checkpoints.look(now + 600)
    job.checkpoints.look(now + 601)
    (order,) = [m for _, m in job.sent if isinstance(m, PersistAt)]
    assert order.step > 21 + schedule.AHEAD  # steps of a second, as none was timed yet


def test_durable_steps_are_one_decision_for_all_ranks() -> None:
    """The next is asked for when the one before is committed, whoever is slow."""

    async def run() -> CheckpointedJob:
        job = CheckpointedJob(checkpoint_minutes=0.0)
        for rank in range(4):
            job.enrol(rank, directory="/ckpt", every=10)
        await settled(job)
        return job

    def orders() -> list[int]:
        for rank in range(4):
            job.checkpoints.heard(job.nodes[rank], Saved(1, rank, newest, 1, 1000, 0.0, 0.0))
        job.checkpoints.look(1000.0)
        return [m.step for _, m in job.sent if isinstance(m, PersistAt)]

    job = asyncio.run(run())
    pace = job.state.pace
    for _ in range(8):
        pace.advance(pace.last + 1.0, 1)
    newest = 40
    assert orders() == []  # the first one, 10, is still being written
    job.checkpoints.heard(job.nodes[0], Committed(1, 10, True, ""))
    assert orders() == [50]
    newest = 55
    assert orders() == [50]
    job.checkpoints.heard(job.nodes[0], Committed(2, 50, False, "no part of rank 1"))
    assert orders() == [50, 60]
    job.state.new_epoch()
    job.checkpoints.new_epoch(0, from_memory=True)
    newest = 57
    for rank in range(4):
        job.checkpoints.heard(job.nodes[rank], Saved(1, rank, 62, 1, 1000, 0.0, 0.0))  # late
    assert orders() == [50, 60]


def test_nodes_that_wait_are_told_once_to_make_room_for_what_a_node_would_fetch() -> None:
    job = CheckpointedJob()
    line = cast(Connection, SimpleNamespace(send=lambda _message: None))
    spare, gone = (
        Node((12, "0", i), f"n{i}", f"10.0.0.{i}", job.nodes[0].hello, line, role, 0.0, 7001)
        for i, role in ((4, Role.SPARE), (5, Role.DEAD))
    )
    for node in (spare, gone):
        job.state.nodes[node.key] = node
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


def test_a_rank_without_a_checkpointer_is_said_once(said: list[str]) -> None:
    job = CheckpointedJob()
    for rank in (0, 2):
        job.enrol(rank)
        job.checkpoints.heard(job.nodes[rank], Saved(1, rank, 1, None, 1000, 0.0, 0.0))
    job.checkpoints.look(100.0)
    job.checkpoints.look(100.0 + module.PARTIAL)
    assert said == []
    job.checkpoints.look(101.0 + module.PARTIAL)
    job.checkpoints.look(102.0 + module.PARTIAL)
    (line,) = said
    assert "ranks 1, 3 have no Checkpointer: nothing can be resumed" in line


def test_a_commit_that_lacks_ranks_without_a_checkpointer_says_so(said: list[str]) -> None:
    job = CheckpointedJob()
    for rank in range(3):
        job.enrol(rank)
    job.checkpoints.heard(job.nodes[0], Committed(1, 10, False, "no part of rank 3"))
    assert "rank 3 has no Checkpointer" in said[0] and "no part of rank 3" in said[1]


def test_snapshots_larger_than_estimated_are_said_once(said: list[str]) -> None:
    job = CheckpointedJob()
    job.enrol(0)
    for step in (1, 2):
        job.checkpoints.heard(job.nodes[0], Saved(1, 0, step, None, 900_000, 0.0, 0.0))
    assert said == []  # what was estimated was 1000 bytes: it does not matter
    for step in (3, 4):
        job.checkpoints.heard(job.nodes[0], Saved(1, 0, step, None, 250_000_000, 0.0, 0.0))
    (line,) = said
    assert "a snapshot takes 250 MB a rank, not 0.0 MB" in line


def test_ranks_that_no_longer_hold_the_same_are_told_once_to_share_nothing(
    said: list[str],
) -> None:
    job = CheckpointedJob()

    async def enrol() -> None:
        for rank in range(4):
            job.enrol(rank, needs=(rank & 2, rank | 1))
        await settled(job)

    asyncio.run(enrol())
    said.clear()

    def saved(rank: int, *same: tuple[int, int]) -> None:
        message = Saved(1, rank, same[-1][0], None, 1000, 0.0, 0.0, same)
        job.checkpoints.heard(job.nodes[rank], message)

    saved(0, (1, 10), (2, 20))
    saved(2, (1, 12), (2, 22))  # of another group
    saved(1, (1, 10), (2, 21))  # of every byte, as step 2 goes to disk: it cannot be compared
    saved(3, (2, 22), (3, 32))
    assert said == []
    saved(1, (3, 30), (4, 40))
    saved(0, (4, 42))
    saved(1, (5, 50))
    saved(0, (5, 52))
    orders = [order for _, order in job.sent if isinstance(order, Unshare)]
    assert {order.ranks for order in orders} == {(0, 1)}
    (line,) = said
    assert "(ranks 1 and 0 differ at step 4): each of the 2 saves all of its own" in line


def test_the_record_is_what_every_rank_has() -> None:
    job = CheckpointedJob()
    assert job.checkpoints.record() is None

    async def run() -> None:
        for rank in range(4):
            job.enrol(rank, directory="/ckpt")
            replicated = None if rank == 3 else 19
            saved = Saved(1, rank, 20 + rank % 2, replicated, 1000 + rank, 0.0, 0.001 * rank)
            job.checkpoints.heard(job.nodes[rank], saved)
        await settled(job)

    asyncio.run(run())
    job.checkpoints.heard(job.nodes[0], Committed(1, 10, True, ""))
    job.checkpoints.heard(job.nodes[0], Committed(2, 15, False, "no part of rank 1"))
    record = job.checkpoints.record()
    assert record is not None
    assert (record["step"], record["replicated"], record["durable"]) == (20, None, 10)
    assert (record["bytes"], record["blocked_s"]) == (1003, 0.003)
    assert record["directory"] == "/ckpt"


def test_a_slow_network_has_fewer_steps_saved_and_says_so(said: list[str]) -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob(checkpoint_minutes=0.0)
        for rank in range(4):
            job.enrol(rank)
        await settled(job)
        return job

    job = asyncio.run(run())
    said.clear()
    for step in range(1, 8):
        for rank in range(4):
            cost = Cost(5.0, 0.0, 9.0, 14.0 if rank == 2 else 1.0)
            saved = Saved(1, rank, step, step, 1000, 0.0, 9.0, cost=cost)
            job.checkpoints.heard(job.nodes[rank], saved)
        job.checkpoints.look(100.0 + 14 * step)
    (order,) = [m for _, m in job.sent if isinstance(m, SaveEvery)]
    assert order.every == 3 and order.first > 4
    (line,) = said
    assert line == (
        "checkpoints: in memory every 3rd step (rank 2: a snapshot and its replica take 14 s, "
        "a step 5 s; checkpoint_overhead is 3 %)"
    )
    record = job.checkpoints.record()
    assert record is not None and record["every"] == 3
    assert f"checkpoints: in memory {record['why_every']}" == line
    job.checkpoints.new_epoch(0, from_memory=False)
    assert job.checkpoints.schedule.interval.every == 1


def test_stores_hear_of_the_newest_step_that_all_ranks_have() -> None:
    async def run() -> CheckpointedJob:
        job = CheckpointedJob()
        for rank in range(4):
            job.enrol(rank)
        await settled(job)
        return job

    def heard(rank: int, safe: int) -> list[tuple[int, int]]:
        saved = Saved(1, rank, 9, None, 1000, 0.0, 0.0, safe=safe, have=(safe,))
        job.checkpoints.heard(job.nodes[rank], saved)
        job.checkpoints.look(next(times))
        return [(m.step, m.passed) for _, m in job.sent if isinstance(m, Complete)]

    job, times = asyncio.run(run()), itertools.count(1000.0)
    assert [heard(rank, 7) for rank in range(4)] == [[], [], [], [(7, 7)]]
    assert heard(0, 9) == [(7, 7)]
    assert heard(1, 8) == heard(2, 8) == [(7, 7)]
    assert heard(3, 8) == [(7, 7), (7, 8)]  # rank 0 left step 8 out
    job.enrol(2)  # it begins anew
    assert [heard(rank, 9) for rank in (0, 1, 3)] == [[(7, 7), (7, 8)]] * 3
    assert heard(2, 9)[2:] == [(-1, 9)]  # step 9 may be gone on rank 2 or the others
    assert [heard(rank, 10) for rank in range(4)][-1][3:] == [(10, 10)]
