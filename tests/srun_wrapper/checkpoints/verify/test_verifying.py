"""The times when robust-srun makes the ranks stand, and sees whether they do."""

from __future__ import annotations

import asyncio
import signal

import pytest
from checkpointed_job import CheckpointedJob
from verified_job import verify_of

from robust_slurm.checkpoint.format.state_sum import PHASE
from srun_wrapper.checkpoints.verify import verifying as module
from srun_wrapper.checkpoints.verify.rules import LIMIT
from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.hang_watch import HangWatch
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.orders.machine_tests import MachineResults
from srun_wrapper.protocol.checkpoint_messages import Committed, Saved, StandAt


async def never(_names: object, _symptom: object) -> MachineResults | None:
    raise AssertionError("no machine is tested here")


class Job(CheckpointedJob):
    """Four ranks; every 10th step is to be computed again."""

    def __init__(self) -> None:
        super().__init__(verify_every=10)
        self.phase = Phase()
        self.phase.name = "running"
        self.verify = verify_of(self, lambda _why: None, never, lambda *_: None, self.phase)
        self.checkpoints.replicas.placed = (
            self.state.world.epoch
        )  # where replicas go is not asked here

    def save(self, *steps: int) -> None:
        """Report these steps as saved by each rank."""
        epoch = self.state.world.epoch
        for rank, step in enumerate(steps):
            saved = Saved(epoch, rank, step, None, 1000, 0.0, 0.0)
            self.checkpoints.heard(self.nodes[rank], saved)

    def asked(self) -> list[int]:
        return [order.step for _, order in self.sent if isinstance(order, StandAt)]


@pytest.fixture
def job() -> Job:
    made = Job()
    for rank in range(4):
        made.enrol(rank)
    return made


def test_ranks_stand_where_all_of_them_can_have_heard_of_it(job: Job) -> None:
    job.verify.look(0.0)
    job.save(1, 1, 1)
    job.verify.look(0.0)
    assert job.asked() == []  # rank 3 has saved nothing yet
    job.save(8, 8, 8, 9)
    job.verify.look(0.0)
    assert job.asked() == [20]  # 10 is a step away
    job.save(20, 20, 20, 19)
    job.verify.look(1.0)
    assert not job.verify.ready
    job.save(20, 20, 20, 20)
    job.verify.look(2.0)
    assert job.verify.ready and job.asked() == [20]


@pytest.mark.parametrize(("steps", "after"), [((20, 21, 20, 20), 0.0), ((20, 20, 20, 19), LIMIT)])
def test_who_did_not_stand_lets_the_others_go_on(
    job: Job, steps: tuple[int, ...], after: float
) -> None:
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(*steps)
    job.verify.look(1.0)
    if after:
        assert job.asked() == [20]
        job.verify.look(1.1 + after)
    assert job.asked() == [20, -1] and not job.verify.ready
    job.save(22, 22, 22, 22)
    job.verify.look(100.0)
    assert job.asked() == [20, -1, 30]


@pytest.mark.parametrize("all_stand", [True, False])
def test_ranks_that_a_signal_ends_do_not_stand(job: Job, all_stand: bool) -> None:
    """A script that only notes the signal must come back to where it looks at its note."""
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 20, 20, 20 if all_stand else 19)
    job.verify.look(1.0)
    assert job.verify.ready is all_stand
    job.state.signalled = signal.SIGTERM
    job.verify.look(2.0)
    assert job.asked() == [20, -1] and not job.verify.ready
    job.verify.look(4.0)
    assert job.asked() == [20, -1]


@pytest.mark.parametrize("why", ["signal", "failure"])
def test_a_check_that_is_cut_short_leaves_nobody_standing(job: Job, why: str) -> None:
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 20, 20, 20)
    job.verify.look(1.0)
    if why == "signal":
        job.state.signalled = signal.SIGTERM
    else:
        job.state.failures.append(Failure("node_lost", 1.0, 1.0, "n1"))
    asyncio.run(job.verify.run())
    assert job.asked() == [20, -1]


def test_a_node_that_did_not_hear_that_ranks_go_on(job: Job) -> None:
    """The node was connecting anew: it is told again until none of its ranks stands."""
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 21, 20, 20)
    job.verify.look(1.0)
    assert job.asked() == [20, -1]
    job.state.pace.in_phase(PHASE, 1.0, 1.0)
    for now in (1.5, 2.1, 2.5, 3.2):
        job.verify.look(now)
    assert job.asked() == [20, -1, -1, -1]
    job.state.pace.in_phase("", 3.3, 3.3)
    job.verify.look(9.0)
    assert job.asked() == [20, -1, -1, -1, 30]


def test_ranks_that_wait_for_a_slow_one_do_not_hang(job: Job) -> None:
    """The ranks get the time that the check gives the slow one; then the job's own limit counts."""
    hang = HangWatch(job.state, lambda: job.verify.held_up)
    job.state.pace.last = 0.0
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 20, 20, 19)
    for now, silent in ((1.0, 0.0), (LIMIT, 0.0), (1.1 + LIMIT, 1.1), (9.1 + LIMIT, 9.1)):
        job.verify.look(now)
        hang.look(now)
        assert job.state.pace.silent(now) == pytest.approx(silent)
    assert job.asked() == [20, -1, 30]
    job.save(30, 30, 30, 30)
    job.verify.look(101.0)
    hang.look(200.0)  # all stand, and their stores are asked what they have
    assert job.verify.ready and job.state.pace.silent(201.0) <= 1.0


@pytest.mark.parametrize("durable", [19, 20])
def test_a_step_on_its_way_to_disk_is_not_thrown_away(durable: int) -> None:
    """The ranks that recompute the step write the step of the check itself."""
    job = Job()
    for rank in range(4):
        job.enrol(rank, directory="/scratch/run", every=durable)
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 20, 20, 20)
    job.verify.look(1.0)
    assert job.verify.ready is (durable == 20)
    if durable == 19:
        assert job.asked() == [20, -1]
        job.verify.look(1.1)
        job.checkpoints.heard(job.nodes[0], Committed(3, 19, True, ""))
        job.save(30, 30, 30, 30)
        job.verify.look(2.0)
        assert job.verify.ready and job.asked() == [20, -1, 30]


@pytest.mark.parametrize("phase", ["recovering", "starting", "checking"])
def test_nothing_is_asked_while_the_job_recovers(job: Job, phase: str) -> None:
    job.phase.name = phase
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    assert job.asked() == []


def test_the_next_epoch_knows_nothing_of_the_last_ones_orders(job: Job) -> None:
    job.save(8, 8, 8, 8)
    job.verify.look(0.0)
    job.save(20, 20, 20, 20)
    job.verify.look(0.0)
    job.verify.begin()
    assert not job.verify.ready


@pytest.mark.parametrize(("change", "why"), [("no Checkpointer", ""), ("input", "not kept")])
def test_what_cannot_be_checked_is_said_once(
    monkeypatch: pytest.MonkeyPatch, change: str, why: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr(module, "say", said.append)
    job = Job()
    job.state.progress.best = 9
    if change == "input":
        for rank in range(4):
            job.enrol(rank)
        job.save(8, 8, 8, 8)
        job.nodes[0].stdin[0] = False  # a rank has read more than is kept
    job.verify.look(0.0)
    job.state.progress.best = 10
    job.verify.look(0.0)
    job.verify.look(1.0)
    (line,) = said
    assert (why or change) in line and line.startswith("--robust-verify-every: ")
    assert job.asked() == [] and job.verify.text.startswith("off: ")
