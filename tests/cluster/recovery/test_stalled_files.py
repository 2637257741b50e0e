"""A shared file system that does not answer for a while: nobody is blamed, the job goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import TOY, Training, prepared
from lab_nodes import leave_idle

from lab import Cluster

NODES = "n[1-3]"
WRAPPER = '#!/bin/sh\nexec python "$@"\n'
STALL = 14.0  # s: longer than any time-out of detection and of ending ranks
SAID = 10.0  # s until a stall is said
QUICK = "--robust-hang-floor=4 --robust-interval=0.2"


@pytest.fixture(scope="module")
def stall_lab() -> Iterator[Cluster]:
    with Cluster(nodes=3, standby=1, scratch=True) as cluster:
        yield cluster


@pytest.fixture
def lab(stall_lab: Cluster) -> Iterator[Cluster]:
    yield stall_lab
    stall_lab.resume(NODES)
    leave_idle(stall_lab)


def on_scratch(lab: Cluster, name: str, text: str) -> Path:
    """Put a program on every node's scratch."""
    path = lab.scratch / name
    for node in ("n1", "n2", "n3", "s1"):
        script = f"cat > {path}.new && chmod 755 {path}.new && mv {path}.new {path}"
        lab.exec(node, ["sh", "-ec", script], input=text, check=True)
    return path


def submit(lab: Cluster, program: Path, toy: str, steps: int = 30) -> Training:
    training = prepared(lab, 3, steps)
    words = f"robust-srun {QUICK} {program} {TOY} --dir {training.dir} --steps {steps} {toy}"
    training.submit(words, ["-N3", "--ntasks-per-node=1"])
    return training


def wait_stalled(training: Training, what: str, nodes: str = NODES) -> None:
    """It is said within 10 s of the stall, or of the ranks' start if that comes later."""
    where = re.escape(f"{what} on {nodes}: file system {training.lab.scratch} does not answer; ")
    training.wait_says(f"^robust-srun: {where}waiting for up to 600 s", SAID)


def check_done(training: Training) -> None:
    """The right loss, on the nodes of the start, and nobody is blamed."""
    training.check_done()
    again = re.escape(f"file system {training.lab.scratch} answers again on n")
    assert training.says(f"^robust-srun: {again}"), training.story()
    assert not training.accusations(), training.story()
    assert not training.events("released"), training.story()
    assert training.lab.job(training.job)["ExcNodeList"] == "(null)"
    assert all(event["nodes"] == ["n1", "n2", "n3"] for event in training.events("epoch"))


def test_ranks_that_cannot_start(lab: Cluster) -> None:
    """Their program does not answer at the job's start, and again at the restart after a crash."""
    program = on_scratch(lab, "program", WRAPPER)
    lab.stall(NODES)
    training = submit(lab, program, "--hold 8")
    training.until(lambda: training.events("epoch"), "start of the ranks")
    wait_stalled(training, "processes cannot start")
    lab.resume(NODES)
    training.wait_step(8)
    said = len(training.out())
    lab.stall(NODES)
    began = time.monotonic()
    training.kill("toy.py", rank=1)
    training.until(lambda: "processes cannot start on" in training.out()[said:], "message", SAID)
    time.sleep(max(0.0, began + STALL - time.monotonic()))
    lab.resume(NODES)
    check_done(training)
    training.only_incident(symptom="crash", action="restart", suspects=[], swaps=[])


def test_ranks_that_wait_for_data(lab: Cluster) -> None:
    """No hang; and when one dies, the others' ranks end when their file system lets them."""
    program = on_scratch(lab, "program", WRAPPER)
    data = on_scratch(lab, "data", "sample")
    training = submit(lab, program, f"--reads {data}", steps=120)
    training.wait_step(20)
    lab.stall("n[1-2]")
    wait_stalled(training, "ranks wait", "n[1-2]")
    began = time.monotonic()
    training.kill("toy.py", rank=2)
    time.sleep(max(0.0, began + STALL - time.monotonic()))
    assert not training.incidents(), training.story()
    lab.resume(NODES)
    check_done(training)
    training.only_incident(symptom="crash", action="restart", suspects=[], swaps=[])
