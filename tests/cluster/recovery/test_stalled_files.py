"""Starts that do not happen, and file systems that do not answer for a while: nobody is blamed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import data_plan
import pytest
from holds import held_back, let_go, roles, wait_held
from jobs import REPOSITORY, TOY, Training, prepared
from lab_nodes import leave_idle

from lab import Cluster
from robust_slurm.data.steps import LocalSteps

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
    """Wait for the message, at most 10 s after the stall, or after a later start of the ranks."""
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
    """The program's file does not answer at the job's start, nor at the restart after a crash."""
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


STEPS = 50  # what is read ahead lasts for less than 30 of them


def with_plan(lab: Cluster, stalled: str) -> Training:
    """Submit a job that reads a plan of files on the scratch. ``stalled``: the sources' policy."""
    training = prepared(lab, 3, STEPS)
    corpus = training.dir / "corpus"
    data_plan.write_corpus(corpus)
    there = lab.scratch / corpus.parent.name
    for node in ("n1", "n2", "n3"):
        lab.exec(node, ["cp", "-r", str(corpus), str(there)], check=True)
    plans = REPOSITORY / "tests" / "support" / "data"
    lines = [
        f"export PYTHONPATH=$PYTHONPATH:{plans}",
        f"export {data_plan.CORPUS}={there} {data_plan.STALLED}={stalled}",
        training.line(QUICK.split(), ["--data=data_plan:on_files", "--step-time=0.01"]),
    ]
    training.submit("\n".join(lines), ["-N3", "--ntasks-per-node=1"])
    return training


def reads(training: Training) -> Iterator[tuple[int, int, int, float]]:
    """Yield rank, step, checksum and seconds of each batch that the ranks have read."""
    for rank in range(3):
        for line in (training.dir / f"order-{rank}").read_text().splitlines():
            step, _, crc, took, *_ = line.split()
            yield rank, int(step), int(crc), float(took)


def test_a_plan_whose_files_do_not_answer(lab: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks wait for their next batch, which is no hang, and go on in the same order."""
    training = with_plan(lab, "wait")
    training.wait_step(10)
    lab.stall(NODES)
    text = r"^robust-srun: ranks wait on \S+: file system "
    training.wait_says(f"{text}{re.escape(str(lab.scratch))} does not answer; ", 40.0)
    assert not training.incidents(), training.story()
    lab.resume(NODES)
    assert training.wait_end() == 0, training.story()
    assert training.says("source web: .*; still waiting for it$"), training.story()
    assert not training.incidents() and len(training.events("epoch")) == 1, training.story()
    check_nobody_blamed(training)
    found = list(reads(training))
    assert max(took for *_, took in found) > 4.0  # the limit of a hang
    monkeypatch.setenv(data_plan.CORPUS, str(training.dir / "corpus"))
    monkeypatch.setenv(data_plan.STALLED, "wait")
    steps, expected = LocalSteps(data_plan.on_files(), range(3), 3), {}
    steps.seek(None)
    for step in range(1, STEPS + 1):
        _, rows, _ = steps.next()
        expected |= {(rank, step): data_plan.checksum(rows[rank]) for rank in range(3)}
    steps.close()
    assert {(rank, step): crc for rank, step, crc, _ in found} == expected
    training.check_gone()


def test_a_plan_whose_files_are_given_up(lab: Cluster) -> None:
    """The job ends, while they do not answer, and names them."""
    training = with_plan(lab, "error")
    training.wait_step(10)
    lab.stall(NODES)
    assert training.wait_end() == 1, training.story()
    assert training.says(r"SourceStalled: (web|code): "), training.story()
    check_nobody_blamed(training)
    lab.resume(NODES)
    training.check_gone()


LAUNCH = 3.0  # s that a node has to start its ranks, or robust-task


def check_nobody_blamed(training: Training) -> None:
    assert not training.accusations(), training.story()
    assert training.lab.job(training.job)["ExcNodeList"] == "(null)"


def test_a_rank_that_does_not_start_in_the_first_epoch(lab: Cluster) -> None:
    """The rank's node alone lags, and no file system is to blame: a spare takes its place."""
    lab.exec("n2", ["mkfifo", "/tmp/out-1"], check=True)  # open() waits for a reader for ever
    training = prepared(lab, 2, steps=30)
    options = f"--robust-spares=1 --robust-launch-limit={LAUNCH} --output=/tmp/out-%t"
    training.submit(training.line(options.split(), []), ["-N3", "--ntasks-per-node=1"])
    training.check_done()
    record = training.only_incident(symptom="node_lost", action="swap_spare", suspects=[])
    assert record["swaps"] == [["n2", "n3"]]
    assert record["evidence"] == [f"n2: did not start its ranks in {LAUNCH:.0f} s"]
    (first, second) = training.events("epoch")
    assert LAUNCH <= second["time"] - first["time"] < LAUNCH + 20, training.story()
    check_nobody_blamed(training)


def test_robust_task_that_does_not_start_is_waited_for(lab: Cluster) -> None:
    """The node takes other steps: as srun would wait, so does robust-srun."""
    training = prepared(lab, 3)
    options = [f"--robust-task-start-limit={LAUNCH}", held_back(training, "n2")]
    training.submit(training.line(options, []), ["-N3", "--ntasks-per-node=1"])
    wait_held(training)
    began = time.monotonic()
    training.wait_says("^robust-srun: 1 of 3 nodes did not start robust-task within 3 s, 3 are ")
    assert time.monotonic() - began < LAUNCH + 20
    assert training.says(r"look at slurmd's log on the nodes missing from: n\[1,3\]$")
    let_go(training)
    training.check_done()
    check_nobody_blamed(training)
    training.check_gone()


def test_robust_task_that_does_not_start_costs_a_spare(lab: Cluster) -> None:
    """The job says that it has one less; the node serves as one when it comes."""
    training = prepared(lab, 2)
    options = ["--robust-spares=1", f"--robust-task-start-limit={LAUNCH}"]
    options.append(held_back(training, "n2"))
    training.submit(training.line(options, ["--hold", "8"]), ["-N3", "--ntasks-per-node=1"])
    training.wait_says("^robust-srun: 1 of 3 nodes did not start robust-task within 3 s: going on ")
    training.wait_step(8)
    let_go(training)
    training.until(lambda: ("n2", "spare") in roles(training), "n2 as a spare")
    training.kill("toy.py", rank=1)
    training.check_done()
    training.only_incident(action="restart", swaps=[])
    check_nobody_blamed(training)
