"""Silent faults that may have spoiled the newest states: what is restored, and what is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from checkpointed_job import CheckpointedJob
from durable_tiers import commit_now, tiny

from robust_slurm.checkpoint.durable import marks
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.dcp.write import write
from robust_slurm.checkpoint.durable.marks import Mark
from robust_slurm.checkpoint.planning.sound import Bound
from robust_slurm.checkpoint.store.events import FetchOutcome, Holding
from srun_wrapper.checkpoints import flushing, restoring
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.job.model import Node
from srun_wrapper.protocol.checkpoint_messages import Flush, Moved, Stock, TakeStock
from srun_wrapper.protocol.messages import Message

WHY = "n3 computed wrongly"


class Answering(CheckpointedJob):
    """Four ranks whose stores have steps 11, 12 and 13, and obey."""

    def __init__(self, tier: Path, proven: int) -> None:
        super().__init__()
        for rank, node in enumerate(self.nodes):
            node.stores[0] = 8000 + rank
            self.enrol(rank, directory=str(tier))
        self.certificates.begin(1, 0)
        self.state.world.by_rank[0].proven = proven

    def obey(self, node: Node, message: Message) -> None:
        rank = self.nodes.index(node)
        if isinstance(message, TakeStock):
            steps = (11, 12, 13) if message.step is None else (message.step,)
            held = tuple(
                Holding(rank, s, 4, (rank,), "memory", f"own-{rank}-{s}", 9, True, "", 1)
                for s in steps
            )
            self.bus.deliver(node, Stock(message.token, 0, held))
        elif isinstance(message, Flush):
            done = FetchOutcome(rank, message.step, True, "", "", 0.0, 9)
            self.bus.deliver(node, Moved(message.token, 0, (done,)))


def committed(tier: Path, certified: int | None, *steps: int) -> None:
    for step in steps:
        write(str(tiny(tier.parent / "own.safetensors", step)), tier, "7.e1")
        commit_now(tier, step, attempt="7.e1", keep=99)
    if certified is not None:
        marks.write(durable.step_dir(tier, certified), "7.e1", Mark(True, True))


@pytest.mark.parametrize(
    ("doubt", "proven", "step", "doubted"),
    [
        ("", 12, 13, []),
        (WHY, 12, 12, []),  # in memory; there are no replicas, a finite loss is all there is
        (WHY, 10, 8, [10]),  # on disk
        (WHY, 2, 4, [8, 10]),
    ],
)
def test_what_is_restored(
    tmp_path: Path, doubt: str, proven: int, step: int, doubted: list[int]
) -> None:
    committed(tmp_path, 4 if proven == 2 else 8, 4, 8, 10)

    async def run() -> tuple[Answering, Restoring]:
        job = Answering(tmp_path, proven)
        found = job.restoring
        job.certificates.suspicion = doubt
        assert await found.prepare()
        return job, found

    job, found = asyncio.run(run())
    assert found.step == step and job.certificates.suspicion == ""
    assert [c.step for c in durable.committed(tmp_path) if c.mark.doubt] == doubted
    assert job.state.nonfinite.bound == (Bound(step, 1) if doubt else None)


@pytest.mark.parametrize(("certified", "step"), [(4, 4), (None, 8)])
def test_after_replicas_that_differ_it_is_a_step_from_before(
    tmp_path: Path, certified: int | None, step: int
) -> None:
    """The last one that they held alike, if none is certified as no loss is reported."""
    committed(tmp_path, certified, 4, 8, 10)

    async def run() -> tuple[Answering, Restoring]:
        job = Answering(tmp_path, 2)
        job.certificates.suspect("ranks 0 and 2 differ at step 10", 8)
        assert await job.restoring.prepare()
        return job, job.restoring

    job, found = asyncio.run(run())
    assert (found.step, found.from_memory) == (step, False)
    assert [c.step for c in durable.committed(tmp_path) if c.mark.doubt] == [
        each for each in (8, 10) if each > step
    ]
    assert job.state.nonfinite.bound == Bound(step, 1)  # the next epoch is newer


@pytest.mark.parametrize(
    ("doubt", "proven", "written", "doubted"),
    [
        ("", 12, 13, []),
        (WHY, 12, 12, []),
        (WHY, 6, None, [10]),  # nothing: step 8 is on disk, and certified
    ],
)
def test_what_is_written_before_the_job_leaves_its_nodes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    doubt: str,
    proven: int,
    written: int | None,
    doubted: list[int],
) -> None:
    """The next job would resume from it."""
    monkeypatch.setattr(restoring, "say", lambda _text: None)
    committed(tmp_path, 8, 4, 8, 10)

    async def run() -> Answering:
        job = Answering(tmp_path, proven)
        job.certificates.suspicion = doubt
        await job.flushing.flush(60.0)
        return job

    job = asyncio.run(run())
    steps = {order.step for _, order in job.sent if isinstance(order, Flush)}
    assert steps == ({written} if written else set())
    assert [c.step for c in durable.committed(tmp_path) if c.mark.doubt] == doubted


def test_a_signal_that_comes_during_the_last_write_leaves_it_little_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write went on for the 600 s of a job that ends by itself, and Slurm killed it."""
    told: list[str] = []
    monkeypatch.setattr(flushing, "say", told.append)
    monkeypatch.setattr(flushing, "SIGNALLED", 0.05)

    class Hanging(Answering):
        def obey(self, node: Node, message: Message) -> None:
            if isinstance(message, Flush):
                self.state.signalled = 15
                self.state.changed.set()
            else:
                super().obey(node, message)

    async def run() -> None:
        await asyncio.wait_for(Hanging(tmp_path, 12).flushing.flush(600.0), 20.0)

    asyncio.run(run())
    assert told == ["checkpoints: step 13 was not written to disk: no answer in time"]


def test_a_job_that_stops_on_a_nan_leaves_the_step_before_it_on_disk(tmp_path: Path) -> None:
    """No step is certified yet: the spoilt step was on disk, and taken for the newest good one."""
    committed(tmp_path, None, 12)

    async def run() -> Answering:
        job = Answering(tmp_path, 0)
        for rank in range(4):
            job.enrol(rank, directory=str(tmp_path), needs=(0, 1))
        job.certificates.suspicion = "a loss was not finite"
        job.state.nonfinite.bound = Bound(11, 1)
        await job.flushing.flush(60.0)
        return job

    job = asyncio.run(run())
    assert {order.step for _, order in job.sent if isinstance(order, Flush)} == {11}
    assert [c.step for c in durable.committed(tmp_path) if c.mark.doubt] == [12]


def test_a_commit_that_ends_while_a_recovery_goes_back_is_doubted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was listed before: the step was the newest one, and unmarked."""
    committed(tmp_path, None, 4, 8)
    listed = restoring.committed

    async def run() -> Answering:
        job = Answering(tmp_path, 2)
        lists = 0

        async def listing(directory: str, limit: float) -> Any:
            nonlocal lists
            lists += 1
            found = await listed(directory, limit)
            if lists == 1:
                committed(tmp_path, None, 10)
            return found

        monkeypatch.setattr(restoring, "committed", listing)
        job.certificates.suspect("ranks 0 and 2 differ at step 10", 8)
        assert await job.restoring.prepare()
        return job

    asyncio.run(run())
    assert [c.step for c in durable.committed(tmp_path) if c.mark.doubt] == [10]
