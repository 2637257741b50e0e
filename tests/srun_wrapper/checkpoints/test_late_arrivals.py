"""Ranks that come up where the restore plan did not expect them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from made_job import KeptJournal, made_node

from robust_slurm.checkpoint.planning.plan import Holder, Resume, Seat, Transfer, plan
from robust_slurm.checkpoint.store.events import Holding
from srun_wrapper.checkpoints import late_arrivals as module
from srun_wrapper.checkpoints.enrolments import StoreAt
from srun_wrapper.checkpoints.late_arrivals import LateArrivals
from srun_wrapper.protocol.checkpoint_messages import Enrolled

NODES = 3


def at(index: int) -> StoreAt:
    return StoreAt(made_node(index), 0)


def own_and_replica(owner: int, tier: str) -> Holding:
    needs = (1, owner)  # all need what rank 1 has, too
    return Holding(owner, 8, NODES, needs, tier, f"{tier}-{owner}", 10, True, "", 1)


SEATS = {rank: Seat(at(rank).name, f"n{rank}") for rank in range(NODES)}
PLACES = [
    Holder(
        at(i).name, f"n{i}", f"10.0.0.{i}", 7000 + i,
        [own_and_replica(i, "memory"), own_and_replica((i + 1) % NODES, "replica")],
    )
    for i in range(NODES)
]  # fmt: skip
SHARDS: dict[str, dict[int, str]] = {f"n{i}": {i: "x", 1: "y"} for i in range(NODES)}


class Job:
    """Three ranks on three nodes; ``fail``: what cannot be used, fetch by fetch."""

    def __init__(self, *fail: set[tuple[str, int, int]]) -> None:
        self.fetched: list[list[tuple[int, str, str]]] = []  # (owner, source, target)
        self.over = False
        self._fail = [*fail]
        self.journal = KeptJournal()
        self.arrivals = LateArrivals(self._fetch, lambda: self.over, self.journal)
        self.plan: Resume = plan(PLACES, SEATS, NODES)
        self.arrivals.begin(self.plan, SEATS, SHARDS)

    async def _fetch(self, transfers: Sequence[Transfer]) -> set[tuple[str, int, int]]:
        self.fetched.append([(t.owner, t.source, t.target) for t in transfers])
        return self._fail.pop(0) if self._fail else set()

    def enrol(self, rank: int, index: int) -> None:
        said = Enrolled(1, 1, 0, rank, NODES, {}, (rank,), "", 0, 1)
        self.arrivals.enrolled(at(index), said)

    def run(self, *ranks: tuple[int, int]) -> None:
        async def come() -> None:
            for rank, index in ranks:
                self.enrol(rank, index)
            while tasks := self.arrivals._tasks:
                await asyncio.wait(tasks)

        asyncio.run(come())


def name(index: int) -> str:
    return at(index).name


def test_ranks_where_they_were_expected_need_nothing() -> None:
    job = Job()
    job.run((0, 0), (1, 1), (2, 2))
    assert job.fetched == job.journal.events == []


def test_ranks_that_changed_places_are_served_together() -> None:
    job = Job()
    job.run((0, 2), (2, 0), (1, 1), (0, 2))
    assert job.fetched == [[(0, name(2), name(2)), (2, name(2), name(0))]]  # it has a replica
    assert job.journal.named("unexpected_seat") == [{"rank": 0, "node": "n2"}]  # said once


def test_what_two_ranks_of_a_node_need_comes_once() -> None:
    job = Job()
    job.arrivals.begin(job.plan, SEATS, {})
    job.run((0, 2), (1, 2))
    assert job.fetched == [[(0, name(2), name(2)), (1, name(1), name(2))]]


def test_another_copy_is_taken_where_one_cannot_be_used() -> None:
    job = Job({(name(0), 0, 8)})
    job.run((0, 1))
    assert job.fetched == [[(0, name(0), name(1))], [(0, name(2), name(1))]]


def test_it_ends_when_no_copy_is_left_or_the_epoch_is_over() -> None:
    job = Job({(name(0), 0, 8)}, {(name(2), 0, 8)})
    job.run((0, 1))
    assert len(job.fetched) == 2
    job = Job()
    job.over = True
    job.run((0, 1))
    assert job.fetched == []


def test_without_a_plan_from_memory_nobody_is_served() -> None:
    job = Job()
    job.arrivals.begin(None, {}, {})
    job.run((0, 2))
    assert job.fetched == []


def test_a_slip_is_said_and_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(module, "say", told.append)
    job = Job()
    monkeypatch.setattr(job.arrivals, "_fetch", lambda _transfers: 1 / 0)
    job.run((0, 2))
    assert "internal error" in told[0] and "ZeroDivisionError" in told[0]
