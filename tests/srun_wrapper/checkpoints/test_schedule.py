"""Orders of which steps are saved, written and freed."""

from __future__ import annotations

import asyncio
import itertools

import checkpointed_job
import pytest
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.checkpoint.planning.interval import Cost
from srun_wrapper.checkpoints import schedule
from srun_wrapper.protocol.checkpoint_messages import (
    Committed,
    Complete,
    PersistAt,
    Saved,
    SaveEvery,
)

said = checkpointed_job.said


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
    (line,) = [text for text in said if "every step" not in text]
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


def test_a_signal_to_the_ranks_brings_a_durable_checkpoint_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Slurm warns of the time limit by one; one that comes again and again costs no more."""

    async def run() -> CheckpointedJob:
        job = CheckpointedJob(checkpoint_minutes=0.0)
        for rank in range(4):
            job.enrol(rank, directory="/ckpt")
            job.checkpoints.heard(job.nodes[rank], Saved(1, rank, 20, 20, 1000, 0.0, 0.0))
        await settled(job)
        return job

    job = asyncio.run(run())

    def orders(now: float) -> int:
        monkeypatch.setattr("srun_wrapper.job.state.time.monotonic", lambda: now)
        job.state.pass_on(12)
        job.checkpoints.look(now)
        for order in (m for _, m in job.sent if isinstance(m, PersistAt)):
            job.checkpoints.heard(job.nodes[0], Committed(1, order.step, True, ""))
        return sum(isinstance(m, PersistAt) for _, m in job.sent)

    job.checkpoints.look(999.0)
    assert not [m for _, m in job.sent if isinstance(m, PersistAt)]
    assert orders(1000.0) == 1
    assert orders(1000.0 + schedule.SIGNALS - 1) == 1
    assert orders(1000.0 + schedule.SIGNALS + 1) == 2
