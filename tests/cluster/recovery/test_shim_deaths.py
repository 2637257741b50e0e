"""Our own processes die, or run out of file descriptors: no node is lost, and none is reported."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from holds import shims
from jobs import Training, start
from lab_nodes import leave_idle

from lab import Cluster

STRANGERS = """
import pathlib, socket, sys, time
rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
ports = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[7] == sys.argv[1]]
held = [socket.create_connection(("127.0.0.1", port)) for port in ports for _ in range(120)]
print(len(ports), flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def shim_lab() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0) as cluster:
        yield cluster


@pytest.fixture
def lab(shim_lab: Cluster) -> Iterator[Cluster]:
    yield shim_lab
    leave_idle(shim_lab)


def shim(training: Training, node: str, local: int) -> int:
    """The pid of a slot's robust-task."""
    found = [
        process.pid
        for process in training.processes("srun_wrapper.agent.task")
        if process.pid in shims(training, node) and process.environ["SLURM_LOCALID"] == str(local)
    ]
    assert len(found) == 1, found
    return found[0]


def check_nobody_blamed(training: Training) -> None:
    assert not training.accusations(), training.story()
    assert not training.events("released"), training.story()
    assert {tuple(event["nodes"]) for event in training.events("epoch")} == {("n1", "n2")}


def test_shims_that_are_killed(lab: Cluster) -> None:
    """First a node's agent, then another shim of the same node."""
    training = start(lab, 2, 2, toy="--hold 8,20")
    for count, (step, local) in enumerate([(8, 0), (20, 1)], 1):
        training.wait_step(step)
        os.kill(shim(training, "n2", local), signal.SIGKILL)
        training.wait_says(rf"(recovered from crash(.|\n)*){{{count}}}")
    training.check_done()
    check_nobody_blamed(training)
    assert [(i["action"], i["swaps"]) for i in training.incidents()] == [("restart", [])] * 2
    assert training.says("^robust-task: n2: the robust-task of local task 1 was killed by SIGKILL")


def test_a_shim_that_dies_again_and_again(lab: Cluster) -> None:
    """The shim's node leaves the job; that is no evidence against the node."""
    training = start(lab, 2, toy="--hold 8,20", robust="--robust-requeue=never")
    training.wait_step(8)
    os.kill(shim(training, "n2", 0), signal.SIGKILL)
    training.wait_step(20)
    os.kill(shim(training, "n2", 0), signal.SIGKILL)
    assert training.wait_end() == 121
    assert not training.accusations(), training.story()
    assert not training.in_memory()


def test_strangers_do_not_exhaust_an_agent(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--hold 8")
    training.wait_step(8)
    agent = shim(training, "n2", 0)
    status = Path(f"/proc/{agent}/status").read_text()
    inside = next(row.split()[-1] for row in status.splitlines() if row.startswith("NSpid:"))
    lab.exec("n2", ["prlimit", "--pid", inside, "--nofile=64:64"], check=True)
    argv = ["python", "-c", STRANGERS, str(lab.uid)]
    with lab.popen("n2", argv, stdout=subprocess.PIPE, text=True) as strangers:
        assert strangers.stdout is not None and int(strangers.stdout.readline()) >= 1
        training.kill("toy.py", rank=2)
        training.check_done()
        strangers.kill()
    assert [(i["action"], i["swaps"]) for i in training.incidents()] == [("restart", [])]
    check_nobody_blamed(training)
