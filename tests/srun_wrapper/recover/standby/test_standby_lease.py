"""A job's lease: asked for, kept, used before anything else, and given back."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import standby_requests
from made_job import made_launch
from standby_requests import StandbyJob, asked, play

from robust_slurm.slurm import Allotted, JobPlacement, StandbyClaim
from robust_slurm.slurm.model import node_from, partition_from
from srun_wrapper.command import steps
from srun_wrapper.job.model import Role
from srun_wrapper.recover.standby import leases as standby_leases
from srun_wrapper.recover.standby.lease_argv import LeaseSize, hold_argv, lease_argv
from srun_wrapper.recover.standby.leases import Leases
from srun_wrapper.recover.standby.request import Barred, Requester, StandbyRequest, outcome
from srun_wrapper.recover.standby.unfit import UnfitNodes
from standby import leases

standby_job = standby_requests.standby_job
ON = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}


class LeaseJob:
    """A job of four nodes, and a Slurm with two nodes for leases."""

    def __init__(self, job: StandbyJob, monkeypatch: pytest.MonkeyPatch) -> None:
        self.job, self.claims = job, list[StandbyClaim]()
        self.jobs = {9: JobPlacement("RUNNING", "train", "bob", tuple(f"n{i}" for i in range(8)))}
        words = {"standby": {"PriorityTier": "100"}, **leases.settings("lease")}
        self.asked: list[str] = []  # of Slurm
        self.partitions = {
            name: partition_from({"PartitionName": name, "State": "UP", "Nodes": "s[1-2]", **w})
            for name, w in words.items()
        }
        given = {"State": "IDLE", "CPUTot": "8", "RealMemory": "1000"}
        self.nodes = {n: node_from({"NodeName": n, **given}) for n in ("s1", "s2")}
        of = SimpleNamespace(id=7, end_time=None, nodes=("a", "b", "c", "d"), account="", qos="")
        job.slurm.job = lambda _id: of
        job.slurm.partitions = lambda: self.partitions
        job.slurm.config = lambda: ON
        job.slurm.nodes = lambda _names=(): self.nodes
        job.slurm.placements = self.placements
        job.slurm.standby_claims = lambda _partition: self.claims
        job.state.progress.beats = 5
        job.state.world.ranks[:] = [(0, 1)]
        slurm: Any = job.slurm
        requester = Requester(made_launch(), steps.Secrets(b"", 1), slurm, lambda _l, _i: {})
        self.leases = Leases(
            job.state, job.requests, requester, Barred(["n5"]), job.journal, lambda: True
        )
        monkeypatch.setattr(standby_leases, "EVERY", 0.0)

    def placements(self) -> dict[int, JobPlacement]:
        self.asked.append("placements")
        return self.jobs

    async def look(self) -> None:
        self.leases.look(1e9)
        assert self.leases._looking is not None
        await self.leases._looking


@pytest.fixture
def lease_job(standby_job: StandbyJob, monkeypatch: pytest.MonkeyPatch) -> LeaseJob:
    return LeaseJob(standby_job, monkeypatch)


def test_a_lease_is_used_before_anything_is_asked_for(lease_job: LeaseJob) -> None:
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        assert "--exclude=n5" in job.asked[0]
        await lease_job.look()  # it waits in the queue: one is enough
        job.requests.prerequest([], [])  # nobody is in doubt: it stays
        assert len(job.asked) == 1
        job.requests.prerequest([(2, "n2")], ["n2"])  # one in the queue replaces nobody
        await asked(job, 2)
        job.comes(1)
        came = await job.standby.take({1: (2, "n2")})
        assert [node.name for node in came.values()] == ["s1"]
        await asked(job, 3)  # the job that keeps its node
        assert {"--partition=lease-held", "--nodelist=s1"} <= set(job.asked[2])

    play(job, scene)


def test_a_lease_with_which_the_world_grows_is_kept(lease_job: LeaseJob) -> None:
    """The lease came before the job lost a node, or while it lacked one."""
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        job.requests.use(1)
        job.requests.use(1)
        await asked(job, 2)
        assert {"--partition=lease-held", "--nodelist=s1"} <= set(job.asked[1])

    play(job, scene)
    assert len(job.asked) == 2


def test_a_job_that_lacks_a_node_asks_for_no_lease(lease_job: LeaseJob) -> None:
    """The job's request for a node of the pool waits in the queue, and would preempt the lease."""
    job = lease_job.job

    async def scene() -> None:
        job.state.world.resized = (4, 3)
        await lease_job.look()
        assert not job.asked
        job.state.world.resized = None
        await lease_job.look()
        await asked(job, 1)

    play(job, scene)


def test_own_requests_do_not_take_the_lease_away(lease_job: LeaseJob) -> None:
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        job.requests.prerequest([(2, "n2"), (2, "n3")], [])
        await asked(job, 2)
        assert "--exclude=s1" in job.asked[1]

    play(job, scene)


def test_a_larger_job_gets_the_node(lease_job: LeaseJob) -> None:
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        busy = node_from({"NodeName": "s2", "State": "ALLOCATED"})
        used = node_from({"NodeName": "s1", "State": "ALLOCATED"})
        lease_job.nodes = {"s1": used, "s2": busy}
        own = StandbyClaim(70, 7, "RUNNING", "ann", ("s1",))
        lease_job.claims = [own]
        await lease_job.look()
        assert "lease_given_back" not in job.events
        lease_job.claims = [own, StandbyClaim(90, 9, "PENDING", "bob", ())]
        await lease_job.look()
        assert "lease_given_back" in job.events
        assert not job.requests.leases()
        await lease_job.look()
        assert len(job.asked) == 1  # and does not get in its way

    play(job, scene)


def test_without_the_partition_it_is_said_what_it_would_buy(
    lease_job: LeaseJob, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once, and not before a node has come: the pool may have none."""
    job = lease_job.job
    del lease_job.partitions["lease"]

    async def scene() -> None:
        await lease_job.look()
        job.requests.prerequest([(2, "n2")], [])
        await asked(job, 1)
        job.requests.assign({1: 2})
        await lease_job.look()
        assert "starts cold" not in capfd.readouterr().err
        job.comes(1)
        job.state.members.move(next(iter(job.state.nodes.values())), Role.ACTIVE)
        for _ in range(2):
            await lease_job.look()

    play(job, scene)
    told = capfd.readouterr().err
    assert told.count("the standby node starts cold") == 1, told


@pytest.mark.parametrize("ready", [0, 1])
def test_a_node_with_which_the_world_grows_is_called_cold_only_if_it_is(
    lease_job: LeaseJob, capfd: pytest.CaptureFixture[str], ready: int
) -> None:
    job = lease_job.job
    del lease_job.partitions["lease"]

    async def scene() -> None:
        await lease_job.look()
        job.requests.prerequest([(2, "n2")], [])
        await asked(job, 1)
        job.comes(1)
        node = next(iter(job.state.nodes.values()))
        node.warm = {0: ready}
        job.requests.use(1)
        job.state.members.move(node, Role.ACTIVE)
        await lease_job.look()

    play(job, scene)
    assert ("starts cold" in capfd.readouterr().err) is (ready == 0)


def test_a_lease_that_slurm_takes_back_is_no_fault(lease_job: LeaseJob) -> None:
    job = lease_job.job
    taken: Any = SimpleNamespace(nodes=("s1",), state="PREEMPTED", reason="None")
    assert outcome(taken, 143, 5.0, away=False) == "again"

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        ((request, node),) = job.requests.leases()
        assert isinstance(request, StandbyRequest) and node is not None
        job.state.members.move(node, Role.RELEASED)
        assert not job.requests.leases() and not job.requests.unfit.names()
        assert job.requests.unfit.to_report(True) == {}

    play(job, scene)


def test_a_lease_whose_node_is_drained_is_given_back(lease_job: LeaseJob) -> None:
    """The gate has drained it meanwhile: it must not get ranks."""
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        lease_job.asked.clear()
        await lease_job.look()
        assert job.requests.leases() and not lease_job.asked  # nobody else waits: few questions
        lease_job.nodes["s1"] = node_from({"NodeName": "s1", "State": "ALLOCATED+DRAIN"})
        await lease_job.look()
        assert not job.requests.leases()

    play(job, scene)


def test_a_lease_that_is_refused_is_said_once_and_asked_for_less_and_less(
    lease_job: LeaseJob, capfd: pytest.CaptureFixture[str]
) -> None:
    job = lease_job.job
    job.srun = standby_requests.BUSY

    async def scene() -> None:
        waits = []
        for number in range(1, 4):
            lease_job.leases._next = 0.0
            lease_job.leases.look(time.monotonic())
            assert lease_job.leases._looking is not None
            await lease_job.leases._looking
            await asked(job, number)
            await job.state.until(lambda: not job.requests.leases(), 10.0)
            now = time.monotonic()
            lease_job.leases.look(now)
            waits.append(lease_job.leases._next - now)
        assert waits == pytest.approx([600.0, 1200.0, 2400.0])

    play(job, scene)
    assert capfd.readouterr().err.count("Slurm refuses a standby node that would wait warm") == 1


def test_a_lease_that_is_always_taken_back_is_asked_for_less_often(lease_job: LeaseJob) -> None:
    waits = []
    for lasted in (1.0, 1.0, 1.0, 700.0, 1.0):
        lease_job.leases._ended(StandbyRequest(1, 1, [], [], since=100.0), 100.0 + lasted)
        waits.append(lease_job.leases._next - 100.0 - lasted)
    assert waits == [5.0, 10.0, 20.0, 5.0, 5.0]


def test_a_leased_node_that_never_reports_is_not_kept(lease_job: LeaseJob) -> None:
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        ((request, _),) = job.requests.leases()
        session = request.process.pid if request.process else 0
        runs = Allotted(70, session, "RUNNING", "None", ("s1",))
        job.slurm.allotted = lambda _name: [runs]
        await lease_job.look()
        assert request.runs_since is not None and job.requests.leases()
        request.runs_since -= 60.0
        await lease_job.look()
        assert not job.requests.leases() and job.requests.unfit.names() == ["s1"]

    play(job, scene)


def test_it_is_said_when_slurm_lets_the_job_that_keeps_the_node_wait(
    lease_job: LeaseJob, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    job = lease_job.job
    monkeypatch.setattr(standby_leases, "HOLDS", 0.01)
    job.slurm.allotted = lambda _name: [
        Allotted(71, srun.pid, "PENDING", "QOSMaxJobsPerUserLimit", ()) for srun in job.sruns
    ]

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        job.requests.assign({1: 2})
        await asked(job, 2)
        said = ""
        while not said:
            await asyncio.sleep(0.01)
            said = capfd.readouterr().err
        assert "s1 may be taken away for another job" in said

    play(job, scene)


def test_a_lease_asks_for_nothing_that_newer_releases_refuse() -> None:
    """No node has both --mincpus and --ntasks-per-node from 24.11 on."""
    of: Any = SimpleNamespace(id=7, account="", qos="", tres_per_node=None, cpus_per_task=1)
    argv = lease_argv(made_launch(), of, "lease", 2, [], 5, LeaseSize(8, 1000))
    assert {"--nodes=1", "--ntasks=2", "--mincpus=8", "--mem=936M"} <= set(argv)
    assert not any(word.startswith(("--ntasks-per-node", "--exclusive")) for word in argv)


def test_the_memory_of_a_node_is_not_asked_for_where_it_is_not_known() -> None:
    of: Any = SimpleNamespace(id=7, account="", qos="")
    known = hold_argv(of, "lease-held", "s1", 5, LeaseSize(8, 1000))
    assert {"--mem=64M", "--mincpus=8"} <= set(known)
    assert not any("--mem" in word for word in hold_argv(of, "held", "s1", 5, LeaseSize(8, 1)))


@pytest.mark.parametrize(("code", "unfit"), [(2, ["s1"]), (143, [])])
def test_a_lease_that_is_taken_back_while_it_starts_leaves_its_node_fit(
    code: int, unfit: list[str]
) -> None:
    ended: Any = SimpleNamespace(returncode=code)
    request = StandbyRequest(1, 2, [], [], process=ended, lease=True, node="s1")
    nodes = UnfitNodes()
    nodes.note_ended(request)
    assert nodes.names() == unfit
    assert not nodes.to_report(True)


def test_a_lease_that_is_taken_back_when_it_is_to_get_ranks(lease_job: LeaseJob) -> None:
    """Another node comes in its place, and nothing is said against this one."""
    job = lease_job.job

    async def scene() -> None:
        await lease_job.look()
        await asked(job, 1)
        job.comes(1)
        ((_, node),) = job.requests.leases()
        assert node is not None

        async def taken(count: int) -> None:
            if count == 3:  # the job that keeps its node; another standby node is still awaited
                job.state.members.move(node, Role.RELEASED)
                job.state.changed.set()
            elif count == 4:
                job.comes(2)
                job.comes(3)

        job.on_start = taken
        came = await job.standby.take({1: (2, "n2"), 2: (2, "n3")})
        assert sorted(each.name for each in came.values()) == ["s2", "s3"]
        assert not job.requests.unfit.names()

    play(job, scene)
