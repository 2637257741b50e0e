"""Ranks that share a state, in a job: who is named, and who never is."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import checkpointed_job
import pytest
from checkpointed_job import CheckpointedJob, settled

from robust_slurm.checkpoint.planning.alike import mark
from robust_slurm.checkpoint.planning.sound import Bound
from srun_wrapper.checkpoints.odd_ranks import COMMIT, SETTLE
from srun_wrapper.decide.diagnosis import Cause
from srun_wrapper.protocol.checkpoint_messages import Committed, PersistAt, Saved, Unshare
from srun_wrapper.recover.reports import Reports

said = checkpointed_job.said


class Replicas(CheckpointedJob):
    """Ranks 0 to 3 on a node each share a state, in groups as a test says."""

    def __init__(self, group: tuple[int, ...] = (0, 1, 2, 3), directory: str = "/ckpt") -> None:
        super().__init__()
        self.acquitted: list[tuple[str, ...]] = []
        ledger: Any = SimpleNamespace(dir=None)
        reports = Reports(self.state, ledger, "u")

        def withdraw(nodes: tuple[str, ...], why: str, cause: Cause) -> None:
            assert cause == "user"
            reports.withdraw(nodes, why, cause)
            self.acquitted.append(nodes)

        self.checkpoints.shared.on_acquitted = withdraw
        self._directory, self.group = directory, group
        asyncio.run(self.enrolled())

    async def enrolled(self) -> None:
        await self.began_anew()
        await settled(self)

    async def began_anew(self) -> None:
        for rank in range(4):
            self.enrol(rank, needs=self.group, directory=self._directory)

    def saved(self, step: int, *others: int, whole: bool = True, commits: bool = True) -> None:
        """All save a step; these ranks hold other bits, each its own."""
        for rank in range(4):
            same = mark(100 + rank if rank in others else step, whole=whole)
            message = Saved(
                self.state.world.epoch, rank, step, None, 1000, 0.0, 0.0, ((step, same),)
            )
            self.checkpoints.heard(self.nodes[rank], message)
        if commits and self._directory and whole and not others:
            self.checkpoints.heard(self.nodes[0], Committed(3, step, True, ""))

    def look(self, after: float = 0.0) -> list[Any]:
        self.checkpoints.shared.look(time.monotonic() + after)
        return self.state.failures

    def unshared(self) -> list[tuple[int, ...]]:
        """The groups that share no more; each order goes to all nodes."""
        orders = [order.ranks for _, order in self.sent if isinstance(order, Unshare)]
        return list(dict.fromkeys(orders))

    def restart(
        self, step: int, *, exchange: tuple[int, int] | None = None, from_memory: bool = False
    ) -> None:
        """Begin an epoch; two nodes exchange their ranks."""
        if exchange:
            one, other = exchange
            self.nodes[one], self.nodes[other] = self.nodes[other], self.nodes[one]
            self.state.members.arrange(self.nodes)
        self.state.members.stop_epoch()
        self.state.new_epoch()
        self.checkpoints.new_epoch(step, from_memory=from_memory)
        asyncio.run(self.enrolled())


def test_a_rank_that_alone_differs_twice_is_named_and_training_goes_back(said: list[str]) -> None:
    job = Replicas()
    job.saved(10)
    job.saved(20, 2)
    assert job.look() == []
    assert job.certificates.bound() == Bound(10, 1) and job.certificates.suspicion
    job.checkpoints.schedule.look(time.monotonic())
    assert [o.step for _, o in job.sent if isinstance(o, PersistAt)]  # not only in ten minutes
    job.saved(21, whole=False)
    job.saved(60, 2)
    (failure,) = job.look()
    assert (failure.symptom, failure.suspects, failure.rank) == ("sdc", ("n2",), 2)
    assert (failure.step, failure.again) == (20, False)
    assert failure.evidence == (
        "rank 2 on n2 held other bits than the 3 ranks that share its state, which agree, at "
        "steps 20 and 60; all agreed at step 10",
    )
    assert job.look() == [failure] and not job.unshared()


def gone_back() -> Replicas:
    """Rank 2 on n2 was odd; its place was exchanged with rank 3's, and all agree again."""
    job = Replicas()
    for step in (10, 20, 30):
        job.saved(step, *([2] if step > 10 else []))
    assert job.look()
    job.restart(10, exchange=(2, 3))
    job.saved(11)
    return job


def test_the_next_time_tells_the_node_from_the_program(said: list[str]) -> None:
    job = gone_back()
    job.saved(20, 3)
    job.saved(30, 3)
    (failure,) = job.look()
    assert (failure.suspects, failure.again) == (("n2",), True)
    assert failure.evidence[1] == (
        "rank 2 was it on n2 before, and has moved to another node since"
    )
    job.restart(10, exchange=(3, 0))  # n2 is evicted; what was its rank differs on its new node
    job.saved(11)
    job.saved(20, 3)
    job.saved(30, 3)
    assert job.look() == [] and job.acquitted == [("n2",)] and job.unshared() == [(0, 1, 2, 3)]


def test_what_follows_the_rank_ends_the_sharing_and_no_more(said: list[str]) -> None:
    job = gone_back()
    job.saved(20, 2)
    job.saved(30, 2)
    assert job.look() == [] and job.unshared() == [(0, 1, 2, 3)]
    assert "rank 2 was it on n2 before, too: the program or the rank's data" in said[-1]
    assert job.certificates.suspicion == "" and job.certificates.bound() is None


@pytest.mark.parametrize(
    ("directory", "steps"),
    [
        ("/ckpt", [(10, ()), (20, (0, 1, 2, 3))]),  # local SGD
        ("/ckpt", [(10, ()), (20, (2, 3))]),
        ("/ckpt", [(10, (2,)), (20, (2,))]),  # never alike
        ("/ckpt", [(10, ()), (20, (2,)), (30, ())]),  # it goes away
        ("/ckpt", [(10, ()), (20, (2,)), (30, (1,))]),
        ("", [(10, ()), (20, (2,))]),  # nothing to go back to
    ],
)
def test_ranks_that_differ_otherwise_share_no_more(
    said: list[str], directory: str, steps: list[tuple[int, tuple[int, ...]]]
) -> None:
    job = Replicas(directory=directory)
    for step, others in steps:
        job.saved(step, *others)
        assert job.look() == []
    assert job.unshared() == [(0, 1, 2, 3)]
    assert job.certificates.suspicion == "" and job.certificates.bound() is None


def test_a_rank_that_does_not_report_does_not_hold_up_the_end_of_the_sharing(
    said: list[str],
) -> None:
    job = Replicas()
    job.saved(10)
    for rank in (0, 1, 2):
        same = mark(7 + (rank == 2), whole=True)
        message = Saved(1, rank, 20, None, 1000, 0.0, 0.0, ((20, same),))
        job.checkpoints.heard(job.nodes[rank], message)
    assert job.look() == [] and not job.unshared()
    assert job.look(after=SETTLE + 1) == [] and job.unshared() == [(0, 1, 2, 3)]
    assert "(ranks 0 and 2 differ at step 20)" in said[-1]


def test_without_a_step_on_disk_from_before_training_does_not_go_back(said: list[str]) -> None:
    """All agreed at step 10, but that could not be written: no space, a slow file system."""
    job = Replicas()
    job.saved(10, commits=False)
    job.saved(20, 2)
    job.saved(30, 2)
    assert job.look() == [] and job.unshared() == [(0, 1, 2, 3)]
    assert "no step from before is on disk" in said[-1]
    assert job.certificates.suspicion == "" and job.certificates.bound() is None


@pytest.mark.parametrize("ok", [True, False])
def test_a_step_from_before_that_is_on_its_way_to_disk_is_waited_for(
    said: list[str], ok: bool
) -> None:
    """Writers that start beside the training take longer than its first steps."""
    job = Replicas()
    job.checkpoints.schedule.durable.every = 10
    job.saved(10, commits=False)
    job.saved(36, 2, whole=False)
    job.saved(60, 2)
    assert job.look() == [] and not job.unshared() and not job.certificates.suspicion
    job.checkpoints.schedule.durable.over(10)  # all ranks have written their parts
    assert job.look() == [] and not job.unshared()
    job.checkpoints.heard(job.nodes[0], Committed(3, 10, ok, "" if ok else "no space"))
    if ok:
        (failure,) = job.look()
        assert failure.evidence[0].endswith("at steps 36 and 60; all agreed at step 10")
        assert job.certificates.bound() == Bound(10, 1)
    else:
        assert job.look(after=COMMIT + 1) == [] and job.unshared() == [(0, 1, 2, 3)]
        assert "no step from before is on disk" in said[-1]


def test_what_resumed_from_memory_needs_a_step_on_disk_too(said: list[str]) -> None:
    job = Replicas()
    job.restart(500, from_memory=True)
    job.saved(501, whole=False)
    job.saved(502, 2)
    assert job.look() == [] and not job.unshared()  # the first step after that goes to disk
    job.checkpoints.schedule.durable.over(501)
    assert job.look(after=COMMIT + 1) == [] and job.unshared() == [(0, 1, 2, 3)]
    job = Replicas()
    job.saved(400)
    job.restart(500, from_memory=True)
    job.saved(501, whole=False)
    job.saved(502, 2)
    assert not job.unshared() and job.certificates.bound() == Bound(500, 2)


def test_steps_before_ranks_began_anew_in_an_epoch_are_not_compared_with_later_ones(
    said: list[str],
) -> None:
    """torchrun restarts its ranks: rank 0's node had reported steps that are computed again."""
    job = Replicas()
    job.saved(10)
    for step in (11, 12, 13):
        same = ((step, mark(7, whole=step == 13)),)
        job.checkpoints.heard(job.nodes[0], Saved(1, 0, step, None, 1000, 0.0, 0.0, same))
    asyncio.run(job.began_anew())
    job.saved(11, whole=False)
    job.saved(12, whole=False)
    job.saved(13)
    assert job.look(after=SETTLE + 1) == [] and not job.unshared()
    assert job.certificates.suspicion == ""
    job.saved(20, 2)
    job.saved(30, 2)
    assert job.look()  # the comparison goes on


def test_a_doubt_ends_with_its_epoch_however_that_resumed(said: list[str]) -> None:
    """Restoring may give up, and each rank looks for its state on disk."""
    job = Replicas()
    job.saved(10)
    job.saved(20, 2)
    assert job.certificates.bound() == Bound(10, 1)
    job.restart(0)
    assert job.certificates.suspicion == "" and job.certificates.bound() is None


@pytest.mark.parametrize(("odd_ranks", "behind"), [((), None), ((2,), Bound(10, 1))])
def test_what_is_heard_during_a_recovery_takes_its_reason_not_away(
    said: list[str], odd_ranks: tuple[int, ...], behind: Bound | None
) -> None:
    job = Replicas()
    job.saved(10)
    if odd_ranks:
        job.saved(20, *odd_ranks)
        job.saved(30, *odd_ranks)
    assert len(job.look()) == len(odd_ranks)
    job.certificates.suspicion = "a loss was not finite"  # as the recovery says
    job.saved(31, 1, 2)
    assert job.unshared()
    assert job.certificates.suspicion == "a loss was not finite"
    assert job.certificates.bound() == behind
