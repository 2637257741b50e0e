"""robust-srun's log as an on-call engineer reads it, and a file system that does not take it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest
from holds import shims
from jobs import Training, prepared, start
from lab_nodes import leave_idle

from lab import Cluster
from robust_slurm.state_dir.job_dirs import LOG


@pytest.fixture(scope="module")
def log_lab() -> Iterator[Cluster]:
    with Cluster(nodes=2, standby=0, scratch=True) as cluster:
        yield cluster


@pytest.fixture
def lab(log_lab: Cluster) -> Iterator[Cluster]:
    yield log_lab
    log_lab.resume("n[1-2]")
    leave_idle(log_lab)


def log_lines(training: Training) -> list[tuple[datetime, str]]:
    lines = (training.job_dir() / LOG).read_text().splitlines()
    return [(datetime.fromisoformat(line.split()[0]), line.split(None, 1)[1]) for line in lines]


def at(lines: list[tuple[datetime, str]], pattern: str) -> datetime:
    found = [when for when, text in lines if re.search(pattern, text)]
    assert found, (pattern, *(text for _, text in lines))
    return found[0]


def test_a_crash_and_a_nodes_warning_are_in_the_log(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--hold 8,20", robust="--robust-log-level=debug")
    training.wait_step(8)
    training.kill("toy.py", rank=3)
    training.wait_says("recovered from crash")
    training.wait_step(20)
    (shim,) = (
        process.pid
        for process in training.processes("srun_wrapper.agent.task")
        if process.pid in shims(training, "n2") and process.environ["SLURM_LOCALID"] == "1"
    )
    os.kill(shim, signal.SIGKILL)
    training.check_done()
    lines = log_lines(training)
    steps = [
        at(lines, r"^INFO .* nodes: n2: spare -> active"),
        at(lines, r"^INFO .* events: epoch: epoch=1, nodes=\['n1', 'n2'\]"),
        at(lines, r"^DEBUG .* wire: n2: Exited .* local=1 .* signal=9"),
        at(lines, r"^INFO .* supervisor: the job is recovering \(was running\)"),
        at(lines, r"^INFO .* recovery: incident \S+-1: diagnosis: symptom crash, .*SIGKILL"),
        at(
            lines,
            r"^INFO .* recovery: incident \S+-1: plan: restart by rung in-place, nodes to .*: none",
        ),
        at(lines, r"^INFO .* events: epoch: epoch=2"),
        at(lines, r"^INFO .* recovery: incident \S+-1: recovered; seconds: detect "),
        at(lines, r"^INFO .* said: recovered from crash"),
    ]
    assert steps == sorted(steps)
    at(lines, r"^WARNING .* agent: n2: the robust-task of local task 1 died and was started again")
    assert re.search("TOY_TOKEN|ROBUST_STEP_KEY", (training.job_dir() / LOG).read_text()) is None
    shown = lab.exec(
        "head", ["robust-status", "--state-dir", str(training.state), str(training.job)]
    )
    assert f"log: {training.job_dir() / LOG}\n" in shown.stdout


def test_a_state_directory_that_stalls_does_not_stop_the_job(lab: Cluster) -> None:
    training = prepared(lab, 2, 40)
    state = Path(lab.scratch) / "state"
    words = training.line([f"--robust-state-dir={state}"], ["--hold", "8"])
    training.submit(words, ["-N2", "--ntasks-per-node=1"])
    training.wait_step(8)
    lab.stall("n1")  # where robust-srun runs
    training.kill("toy.py", rank=1)
    training.check_done()
    assert training.says("^robust-srun: recovered from crash"), training.out()
    missing = rf"^robust-srun: \d+ lines of {LOG} could not be written: no answer from the file"
    assert training.says(missing), training.out()
