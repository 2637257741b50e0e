"""The contract of the door to Slurm, held against a real slurmctld, by both of its ways.

The commands are those of this machine; pyslurm takes part where this Python can import one that
was built for that release.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from health.children.call import call_in_child
from lab.errors import LabError
from lab.slurm.controller import Controller
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.by_pyslurm import PySlurm
from robust_slurm.slurm.choose import connect

pytestmark = pytest.mark.cluster
SCRIPT = "#!/bin/sh\nsleep 60\n"
DEADLINE_S = 20.0  # of calls that are to succeed on a busy machine
LATE_S = 1.0
GONE = (
    "localhost"  # no node, behind the nodes' names, and found at once where slurmctld looks it up
)


@pytest.fixture(scope="module")
def controller() -> Iterator[Controller]:
    try:
        with Controller(nodes=8) as found:
            yield found
    except LabError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["commands", "pyslurm"])
def opened(
    request: pytest.FixtureRequest, controller: Controller
) -> Iterator[Callable[[float], Slurm]]:
    """Opens clients of one backend with a deadline."""
    environ = {**os.environ, **controller.env}
    clients: list[Slurm] = []

    def client(deadline_s: float) -> Slurm:
        if request.param == "commands":
            clients.append(Slurm(deadline_s=deadline_s, environ=environ, ping_first=True))
        else:
            clients.append(PySlurm(deadline_s=deadline_s, environ=environ, required=True))
        return clients[-1]

    if request.param == "pyslurm":
        looked = PySlurm(deadline_s=DEADLINE_S, environ=environ, required=True)
        which, why = looked.backend()
        looked.close()
        if which != "pyslurm":
            pytest.skip(f"no pyslurm of this Slurm release: {why}")
    yield client
    for each in clients:
        each.close()


@pytest.fixture
def slurm(opened: Callable[[float], Slurm]) -> Slurm:
    return opened(DEADLINE_S)


@pytest.fixture
def commands(controller: Controller) -> Slurm:
    return Slurm(deadline_s=DEADLINE_S, environ={**os.environ, **controller.env})


@pytest.fixture(autouse=True)
def _tidy(controller: Controller) -> Iterator[None]:
    """Leave no drain, no job and no stopped slurmctld to the next test."""
    yield
    controller.signal(signal.SIGCONT)
    slurm = Slurm(deadline_s=DEADLINE_S, environ={**os.environ, **controller.env})
    for node in slurm.nodes().values():
        if "DRAIN" in node.state:
            slurm.undrain(node.name, "")
    for job, state in slurm.job_states().items():
        if state in ("PENDING", "CONFIGURING", "RUNNING"):
            slurm.cancel(job)


def running(slurm: Slurm, job: int) -> None:
    """Wait until the job has nodes."""
    until = time.monotonic() + 30
    while slurm.job_states().get(job) not in ("CONFIGURING", "RUNNING"):
        assert time.monotonic() < until, slurm.job(job)
        time.sleep(0.1)


def same(ask: Callable[[], object], ask_commands: Callable[[], object]) -> None:
    """Compare two answers to which nothing changed meanwhile: Slurm wakes the job's nodes."""
    until = time.monotonic() + 30
    while True:
        before, found, after = ask_commands(), ask(), ask_commands()
        if before == after:
            assert found == before
            return
        assert time.monotonic() < until, "the answers do not settle"


def refused(call: Callable[[], object]) -> SlurmError:
    with pytest.raises(SlurmError) as caught:
        call()
    return caught.value


def test_it_reaches_slurm(slurm: Slurm) -> None:
    assert slurm.ping()
    release = "{:02d}.{:02d}".format(*slurm.version())
    assert slurm.config()["SLURM_VERSION"].startswith(release)


def test_both_see_the_same(slurm: Slurm, commands: Slurm, tmp_path: Path) -> None:
    slurm.drain("c3", "xid-79 = (gpu 1), State=IDLE")
    job = slurm.submit(SCRIPT, args=["-N2", "-J", "a b\nJobId=7 JobState=FAILED"], cwd=tmp_path)
    running(slurm, job)
    for question in ("nodes", "partitions", "job_owners", "placements"):
        same(getattr(slurm, question), getattr(commands, question))
    assert slurm.job_owners()[job] == os.getuid()
    assert len(slurm.placements()[job].nodes) == 2
    assert slurm.job_states()[job] == "CONFIGURING"
    node = slurm.nodes()["c3"]
    assert node.reason == "robust: xid-79 = (gpu 1), State=IDLE" and node.features == (
        "fast",
        "big",
    )
    assert abs((node.reason_time or 0) - time.time()) < 60


def test_nodes_that_slurm_does_not_know_are_missing(slurm: Slurm) -> None:
    assert list(slurm.nodes(["c1", "nope"])) == ["c1"]
    assert slurm.nodes([]) == {}


def test_drain_and_undrain(slurm: Slurm) -> None:
    assert slurm.drain("c1", "fan").done
    assert "DRAIN" in slurm.nodes()["c1"].state
    assert slurm.undrain("c1").done
    assert "DRAIN" not in slurm.nodes()["c1"].state
    assert refused(lambda: slurm.drain("nope", "fan")).kind == "not_found"


def test_a_drain_of_somebody_else_stays(slurm: Slurm, commands: Slurm) -> None:
    commands._set_node("c1", {"State": "DRAIN", "Reason": "by hand"}, time.monotonic() + 20)
    assert not slurm.drain("c1", "fan").done
    assert not slurm.undrain("c1").done
    assert slurm.nodes()["c1"].reason == "by hand"
    commands.undrain("c1", "by hand")
    assert slurm.drain("c1", "fan").done  # from 24.11 the words stand there still


def test_requeue(slurm: Slurm, tmp_path: Path) -> None:
    held = slurm.submit(SCRIPT, args=["--hold"], cwd=tmp_path)
    assert refused(lambda: slurm.requeue(held)).kind == "conflict"  # it waits already
    job = slurm.submit(SCRIPT, cwd=tmp_path)
    running(slurm, job)
    slurm.requeue(job)
    found = slurm.job(job)
    assert found.restarts == 1 and not found.running
    assert refused(lambda: slurm.requeue(4_000_000)).kind == "not_found"
    slurm.cancel(job)
    slurm.cancel(job)


def test_a_job_without_all_its_nodes_is_not_shrunk(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.submit(SCRIPT, args=["-N2"], cwd=tmp_path)
    assert refused(lambda: slurm.shrink(job, ["c1"])).kind == "conflict"
    mine = slurm.jobs(slurm.job(job).user, after=job - 1)
    assert job in {one.id for one in mine if one.state in ("PENDING", "CONFIGURING")}


def test_reservations_and_partitions(slurm: Slurm) -> None:
    wanted = {"StartTime": "now", "Duration": "5", "Nodes": "c8", "Users": "root"}
    slurm.create_reservation("mine", wanted)
    assert refused(lambda: slurm.create_reservation("mine", wanted))
    slurm.delete_reservation("mine")
    slurm.delete_reservation("mine")
    slurm.update_partition("spare", {"Nodes": "c2"})
    assert slurm.partitions()["spare"].nodes == ("c2",)
    assert slurm.nodes()["c1"].partitions == ("train",)
    slurm.update_partition("spare", {"Nodes": "c[1-2]"})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")
def test_users_may_not_drain(opened: Callable[[float], Slurm]) -> None:
    def as_nobody() -> str:
        os.setgid(65534)
        os.setuid(65534)
        return refused(lambda: opened(DEADLINE_S).drain("c1", "fan")).kind

    assert call_in_child(as_nobody, 2 * DEADLINE_S) == ("denied", "")


CALLS: list[Callable[[Slurm], object]] = [
    lambda slurm: slurm.nodes(),
    lambda slurm: slurm.job_states(),
    lambda slurm: slurm.drain("c1", "fan"),
    lambda slurm: slurm.requeue(1),
    lambda slurm: slurm.submit(SCRIPT),
]


def test_a_silent_slurmctld_costs_the_deadline(
    opened: Callable[[float], Slurm], controller: Controller
) -> None:
    for call in CALLS:
        slurm = opened(DEADLINE_S)
        assert slurm.nodes()  # pyslurm's process runs
        slurm._deadline_s = LATE_S
        controller.signal(signal.SIGSTOP)
        began = time.monotonic()
        error = refused(lambda call=call, slurm=slurm: call(slurm))
        took = time.monotonic() - began
        controller.signal(signal.SIGCONT)
        assert error.kind == "timeout" and took < LATE_S + 3, (error, took)


def test_an_absent_slurmctld_is_named_at_once(
    opened: Callable[[float], Slurm], controller: Controller
) -> None:
    slurm = opened(DEADLINE_S)
    slurm.ping()
    controller.stop()
    try:
        for call in CALLS:
            slurm._heard = 0.0
            began = time.monotonic()
            error = refused(lambda call=call: call(slurm))
            assert error.kind == "unreachable", error
            assert time.monotonic() - began < 5  # within 1 s on a machine that is not busy
        assert not slurm.ping()
    finally:
        controller.start()


def test_the_choice(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in controller.env.items():
        monkeypatch.setenv(name, value)
    assert connect("commands").backend() == ("commands", "slurm_backend = commands")
    slurm = connect("auto", DEADLINE_S)
    assert slurm.backend()[0] in ("commands", "pyslurm") and slurm.backend()[1]
    assert slurm.nodes()
    slurm.close()
