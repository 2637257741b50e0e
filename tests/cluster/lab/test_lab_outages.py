"""The lab's faults of several nodes at once and of Slurm's daemons, and how each one ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from lab_nodes import hostnames
from waiting import until

from lab import Cluster, LabError, host


@pytest.fixture(scope="module")
def module_scratch_lab() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0, scratch=True) as cluster:
        yield cluster


@pytest.fixture
def scratch_lab(module_scratch_lab: Cluster) -> Iterator[Cluster]:
    yield module_scratch_lab
    for node, fault in module_scratch_lab.faults().items():
        if fault != "up":
            module_scratch_lab.heal(node)
    assert set(module_scratch_lab.faults().values()) == {"up"}
    assert hostnames(module_scratch_lab, 2) == ["n1", "n2"]
    # A job that ends while a link is down would leave its nodes COMPLETING for minutes.
    idle = {frozenset({"IDLE"})}
    until(lambda: set(module_scratch_lab.nodes().values()) == idle, "idle nodes", 20)


def reaches(lab: Cluster, node: str, target: str) -> bool:
    probe = f"import socket; socket.create_connection(('{target}', 6818), timeout=0.3)"
    return lab.exec(node, ["python", "-c", probe]).returncode == 0


def state(lab: Cluster, node: str, pid: str) -> str:
    return lab.exec(node, ["cut", "-d ", "-f3", f"/proc/{pid}/stat"]).stdout.strip()


def test_a_stalled_mount_goes_on_without_an_error(scratch_lab: Cluster) -> None:
    file = scratch_lab.scratch / "data"
    write = f"echo $$; read go; echo more >> {file}; cat {file}"
    with scratch_lab.popen(
        "n1", ["sh", "-c", write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdin is not None and one.stdout is not None
        pid = one.stdout.readline().strip()
        scratch_lab.stall("n[1-2]")
        assert scratch_lab.faults()["n2"] == f"stalled:{scratch_lab.scratch}"
        one.stdin.write("\n")
        one.stdin.flush()
        until(lambda: state(scratch_lab, "n1", pid) == "D", "a wait for the mount", 10)
        scratch_lab.resume(["n1", "n2"])
        assert one.stdout.read() == "more\n"
        assert one.wait(20) == 0
    assert scratch_lab.exec("n1", ["cat", str(file)]).stdout == "more\n"


def test_heal_ends_a_stall(scratch_lab: Cluster) -> None:
    scratch_lab.stall("n1")
    scratch_lab.heal("n1")
    assert scratch_lab.exec("n1", ["ls", str(scratch_lab.scratch)], timeout=20).returncode == 0


def test_an_outage_takes_all_links_and_ends_by_itself(scratch_lab: Cluster) -> None:
    assert reaches(scratch_lab, "n1", "n2")
    scratch_lab.outage("n[1-2]")
    assert scratch_lab.faults() == {"head": "up", "n1": "cut", "n2": "cut"}
    assert not reaches(scratch_lab, "n1", "n2") and not reaches(scratch_lab, "head", "n1")
    scratch_lab.reconnect("n1,n2")
    until(lambda: reaches(scratch_lab, "n1", "n2"), "the link", 20)
    began = time.monotonic()
    scratch_lab.outage("n2", 1.0)
    until(lambda: scratch_lab.faults()["n2"] == "up", "the end of the outage", 20)
    assert time.monotonic() - began >= 1.0


def test_a_paused_node_is_silent_and_goes_on(scratch_lab: Cluster) -> None:
    with scratch_lab.popen("n2", ["sh", "-c", "echo $$; exec sleep 600"],
                           stdout=subprocess.PIPE, text=True) as sleeper:  # fmt: skip
        assert sleeper.stdout is not None
        pid = sleeper.stdout.readline().strip()
        scratch_lab.pause("n2")
        assert scratch_lab.faults()["n2"] == "paused"
        assert state(scratch_lab, "n2", pid) == "T"
        assert not reaches(scratch_lab, "n1", "n2")
        scratch_lab.reconnect("n2")
        until(lambda: state(scratch_lab, "n2", pid) == "S", "its sleep", 20)
        assert reaches(scratch_lab, "n1", "n2")
        sleeper.terminate()


def test_a_link_delays_and_drops(scratch_lab: Cluster) -> None:
    probe = (
        "import socket, time; began = time.monotonic()\n"
        "socket.create_connection(('n2', 6818), timeout=10); print(time.monotonic() - began)"
    )

    def seconds() -> float:
        done = scratch_lab.exec("n1", ["python", "-c", probe], check=True)
        return float(done.stdout)

    scratch_lab.slow("n2", delay_ms=300)
    assert scratch_lab.faults()["n2"] == "slow"
    assert seconds() >= 0.6
    scratch_lab.slow("n2", loss_percent=100)
    assert not reaches(scratch_lab, "n1", "n2")
    scratch_lab.heal("n2")
    assert min(seconds() for _ in range(5)) < 0.6


@pytest.mark.parametrize(("node", "name"), [("n1", "slurmd"), ("head", "slurmctld")])
def test_daemons_freeze_and_stop(scratch_lab: Cluster, node: str, name: str) -> None:
    scratch_lab.daemon(node, name, "freeze")
    assert scratch_lab.faults()[node] == f"{name}-frozen"
    scratch_lab.daemon(node, name, "thaw")
    assert scratch_lab.faults()[node] == "up"
    scratch_lab.daemon(node, name, "stop")
    assert scratch_lab.faults()[node] == f"{name}-stopped"
    with pytest.raises(LabError, match=f"{name} does not run on {node}"):
        scratch_lab.daemon(node, name, "freeze")
    scratch_lab.heal(node)
    with pytest.raises(LabError, match=f"{name} runs on {node} already"):
        scratch_lab.daemon(node, name, "start")


def test_without_munged_nobody_is_known(scratch_lab: Cluster) -> None:
    scratch_lab.daemon("head", "munged", "stop")
    with pytest.raises(LabError):
        scratch_lab.nodes()
    scratch_lab.heal("head")
    assert set(scratch_lab.nodes()) == {"n1", "n2"}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("stall n1 /tmp", "no mount of the lab's"),
        ("outage n[1-3] 1", "no node 'n3'"),
        ("pause head", "only its daemons"),
        ("slow n1 --loss 101", "a loss of 0 to 100 %"),
        ("daemon n1 slurmctld stop", "no daemon 'slurmctld' on n1; there are: slurmd"),
    ],
)
def test_refusals_change_nothing(scratch_lab: Cluster, words: str, why: str) -> None:
    done = run(scratch_lab, words)
    assert done.returncode == 2 and why in done.stderr
    assert set(scratch_lab.faults().values()) == {"up"}


def test_the_verbs(scratch_lab: Cluster) -> None:
    for words, fault in (("stall n1", "stalled:"), ("resume n1", "up"), ("outage n1 60", "cut")):
        done = run(scratch_lab, words)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(words.split()[0])
        assert scratch_lab.faults()["n1"].startswith(fault)
    run(scratch_lab, "reconnect n1")


def run(lab: Cluster, words: str) -> subprocess.CompletedProcess[str]:
    verb, *more = words.split()
    argv = [sys.executable, "-m", "lab", verb, "--name", lab.name, *more]
    return subprocess.run(argv, cwd=host.REPOSITORY, capture_output=True, text=True, timeout=60)
