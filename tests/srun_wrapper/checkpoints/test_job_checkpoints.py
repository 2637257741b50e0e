"""Messages of the ranks' stores, and what is reported of them."""

from __future__ import annotations

import asyncio
import time

import checkpointed_job
from checkpointed_job import CheckpointedJob, settled

from srun_wrapper.checkpoints import registry as module
from srun_wrapper.checkpoints.alarms import COUNT_AFTER
from srun_wrapper.job.model import Node, Role
from srun_wrapper.protocol.checkpoint_messages import (
    Alarm,
    Committed,
    Enrolled,
    Persisted,
    Saved,
    Unshare,
)

said = checkpointed_job.said


def test_ranks_of_another_epoch_or_of_a_lost_node_are_not_heard(said: list[str]) -> None:
    job = CheckpointedJob()
    late = Enrolled(1, 7, 0, 0, 4, {}, (0,), "", 0, 1)
    job.checkpoints.heard(job.nodes[0], late)
    assert not job.enrolments.ranks
    stranger = Node((13, "0", 0), "s1", "10.0.0.9", job.nodes[0].hello, None, Role.DEAD, 0.0, 7001)
    job.checkpoints.heard(stranger, Enrolled(1, 1, 0, 0, 4, {}, (0,), "", 0, 1))
    assert not job.enrolments.ranks


def test_an_alarm_of_a_node_names_no_rank(said: list[str]) -> None:
    job = CheckpointedJob()
    job.checkpoints.heard(job.nodes[2], Alarm(0, -1, "checkpoint_interface ib0: no interface"))
    assert said == ["checkpoints, n2: checkpoint_interface ib0: no interface"]


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
    assert "(ranks 1 and 0 differ at step 4): each of the 2 ranks saves its whole state" in line


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
