"""Before an epoch: who is asked for what there is to restore, and who is not waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

import checkpointed_job
import pytest
from checkpointed_job import CheckpointedJob, settled
from waiting import idle

from robust_slurm.checkpoint.planning.plan import Transfer
from robust_slurm.checkpoint.store.events import FetchOutcome
from srun_wrapper.checkpoints import restoring
from srun_wrapper.checkpoints import stores as stores_module
from srun_wrapper.checkpoints.enrolments import StoreAt
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import WaitLimit
from srun_wrapper.job.model import Node, Role
from srun_wrapper.protocol.checkpoint_messages import (
    Fetch,
    Flush,
    Moved,
    Persisted,
    Stock,
    StoreReady,
    TakeStock,
)
from srun_wrapper.protocol.messages import Message

said = checkpointed_job.said


def test_ranks_that_died_before_they_enrolled_are_started_again(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job whose rank 1 dies in start-up has nothing to restore, and that is no error."""
    monkeypatch.setattr(stores_module, "STOCK", 0.05)

    async def run() -> tuple[bool, Restoring]:
        job = CheckpointedJob()
        for rank in range(4):
            job.checkpoints.heard(job.nodes[rank], StoreReady(1, 0, 8000 + rank))
        job.enrol(0)
        found = job.restoring
        return await found.prepare(), found

    ready, found = asyncio.run(run())
    assert ready and found.step is None
    assert said == []


@pytest.mark.parametrize("reachable", [False, True])
def test_a_lost_node_that_answers_no_probe_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    monkeypatch.setattr(stores_module, "LEAVING", 0.1 if reachable else 3600.0)

    class Answering(CheckpointedJob):
        def obey(self, node: Node, message: Message) -> None:
            if isinstance(message, TakeStock) and not node.gone:
                self.bus.deliver(node, Stock(message.token, 0, ()))

    async def run() -> list[str]:
        job = Answering()
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        job.nodes[3].role, job.nodes[3].unreachable = Role.DEAD, 0 if reachable else 2
        places = await asyncio.wait_for(job.stores.stock(lambda: False), 60)
        assert len([m for _, m in job.sent if isinstance(m, TakeStock)]) == 4  # all are asked
        return [place.node for place in places]

    assert asyncio.run(run()) == ["n0", "n1", "n2"]


def test_a_slip_in_the_plan_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(restoring, "say", told.append)
    monkeypatch.setattr(stores_module, "STOCK", 0.05)
    monkeypatch.setattr(restoring.planner, "plan", lambda *_: 1 / 0)

    async def run() -> tuple[bool, Restoring]:
        job = CheckpointedJob()
        for rank in range(4):
            job.enrol(rank)
        await settled(job)
        found = job.restoring
        return await found.prepare(), found

    ready, found = asyncio.run(run())
    assert ready and found.step is None
    assert "internal error" in told[0] and "ZeroDivisionError" in told[0]


def test_a_store_that_comes_back_while_a_recovery_plans_is_waited_for() -> None:
    """The store's robust-task was started again: all snapshots in memory were given up."""

    async def run() -> tuple[list[Message], list[Message]]:
        job = CheckpointedJob()
        stores = [StoreAt(node, 0).name for node in job.nodes]
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        job.nodes[1].stores.clear()
        one = Transfer(1, 7, stores[0], "10.0.0.0", 8000, stores[1], "n1", 1, "memory")
        fetching = asyncio.create_task(job.stores.fetch([one], lambda: False))
        await idle()
        before = [m for _, m in job.sent if isinstance(m, Fetch)]
        job.nodes[1].stores[0] = 8001
        job.state.changed.set()
        await idle()
        fetching.cancel()
        return before, [m for _, m in job.sent if isinstance(m, Fetch)]

    before, after = asyncio.run(run())
    assert before == [] and len(after) == 1


def test_a_store_that_fetches_nothing_is_replaced_but_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store's way to the source may be slow: this does not show that its node is bad."""
    monkeypatch.setattr(stores_module, "FETCH", 0.05)

    async def run() -> CheckpointedJob:
        job = CheckpointedJob()
        stores = [StoreAt(node, 0).name for node in job.nodes]
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        transfers = tuple(
            Transfer(rank, 7, stores[0], "10.0.0.0", 8000, stores[rank], f"n{rank}", 1, "memory")
            for rank in (1, 2)
        )

        def obey(node: Node, message: Message) -> None:
            if isinstance(message, Fetch) and node.name == "n1":
                results = tuple(
                    FetchOutcome(w.owner, w.step, True, "", "f", 0.1, 1) for w in message.items
                )
                job.bus.deliver(node, Moved(message.token, 0, results))

        job.bus.obey = obey
        assert await job.stores.fetch(transfers, lambda: False) == set()
        return job

    (failure,) = asyncio.run(run()).state.failures
    assert failure.node == "n2" and failure.shared


def test_several_stores_that_fetch_nothing_cost_no_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stores share the way or the source: the plan goes on without these copies."""
    monkeypatch.setattr(stores_module, "FETCH", 0.05)
    told: list[str] = []

    async def run() -> tuple[CheckpointedJob, set[tuple[str, int, int]], str]:
        job = CheckpointedJob()
        job.journal.told = told
        stores = [StoreAt(node, 0).name for node in job.nodes]
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        transfers = tuple(
            Transfer(rank, 7, stores[0], "10.0.0.0", 8000, stores[rank], f"n{rank}", 1, "memory")
            for rank in (1, 2)
        )
        return job, await job.stores.fetch(transfers, lambda: False), stores[0]

    job, bad, source = asyncio.run(run())
    assert job.state.failures == []
    assert bad == {(source, 1, 7), (source, 2, 7)}
    assert told == [
        "no snapshots arrived at n[1-2] in 0.05 s: other copies or durable checkpoints are used"
    ]


def test_a_flush_ends_with_the_first_store_that_cannot_write() -> None:
    """The others would wait for its part until their deadline, and the job's end for them."""

    class Full(CheckpointedJob):
        def obey(self, node: Node, message: Message) -> None:
            if isinstance(message, Flush) and node is self.nodes[1]:
                done = FetchOutcome(1, 7, False, "no space", "f", 0.0, 0)
                self.bus.deliver(node, Moved(message.token, 0, (done,)))

    async def run() -> None:
        job = Full()
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        files = {StoreAt(node, 0).name: [(rank, "f")] for rank, node in enumerate(job.nodes)}
        flush = job.stores.flush(7, files, (next(iter(files)), 2), 600.0, lambda: False)
        assert await asyncio.wait_for(flush, 20.0) == "no space"

    asyncio.run(run())


class Unseen(CheckpointedJob):
    """A job whose stores write each to a disk of their own. ``slow``: the first has not written."""

    def __init__(self, *, slow: bool = False) -> None:
        super().__init__()
        self.slow = slow
        for rank, node in enumerate(self.nodes):
            node.stores[0] = 8000 + rank
        self.files = {StoreAt(n, 0).name: [(rank, "f")] for rank, n in enumerate(self.nodes)}

    def obey(self, node: Node, message: Message) -> None:
        rank = self.nodes.index(node)
        if isinstance(message, Flush) and not (self.slow and rank == 0):
            self.checkpoints.heard(node, Persisted(1, rank, 7, True, "", 0.1))
            if rank > 0:
                done = FetchOutcome(rank, 7, True, "", "f", 0.1, 1)
                self.bus.deliver(node, Moved(message.token, 0, (done,)))

    def flush(self, seconds: float = 600.0, limits: Sequence[WaitLimit] = ()) -> Awaitable[str]:
        committer = next(iter(self.files)), 4
        flush = self.stores.flush(7, self.files, committer, seconds, lambda: False, limits)
        return asyncio.wait_for(flush, 20.0)


def test_a_flush_does_not_wait_for_parts_that_its_committer_cannot_see(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a directory that is local to each node; each requeue and the job's end took 600 s."""
    monkeypatch.setattr(stores_module, "UNSEEN", 0.05)

    async def run() -> None:
        why = await Unseen().flush()
        assert why.startswith("all ranks have written their parts, but n0 did not commit the step")
        # A committer that has not written its own part yet is as slow as others may be.
        job = Unseen(slow=True)
        job.checkpoints.heard(job.nodes[1], Persisted(1, 0, 7, True, "", 0.1))  # by another node
        assert await job.flush(0.2) == "no answer in time"

    asyncio.run(run())


def test_a_signal_bounds_the_rest_of_a_flush() -> None:
    async def run() -> None:
        job = Unseen(slow=True)
        flush = asyncio.ensure_future(job.flush(limits=[(lambda: job.state.signalled > 0, 0.05)]))
        await idle()
        assert not flush.done()
        job.state.signalled = 15
        job.state.changed.set()
        assert await flush == "no answer in time"

    asyncio.run(run())


def test_a_store_that_fails_without_a_word_has_fetched_and_written_nothing() -> None:
    class Failing(CheckpointedJob):
        def obey(self, node: Node, message: Message) -> None:
            if isinstance(message, Fetch | Flush):
                self.bus.deliver(node, Moved(message.token, 0, ()))

    async def run() -> None:
        job = Failing()
        for rank, node in enumerate(job.nodes):
            node.stores[0] = 8000 + rank
        source, store = (StoreAt(node, 0).name for node in job.nodes[:2])
        transfer = Transfer(1, 7, source, "10.0.0.0", 8000, store, "n1", 1, "memory")
        assert await job.stores.fetch([transfer], lambda: False) == {(source, 1, 7)}
        why = await job.stores.flush(7, {store: [(1, "f")]}, (store, 1), 1.0, lambda: False)
        assert why == stores_module.FAILED

    asyncio.run(run())
