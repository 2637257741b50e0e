"""Our own processes are stopped (SIGSTOP) while the ranks step on: no node is lost nor blamed."""

from __future__ import annotations

import os
import signal

import pytest
from conftest import LabFactory
from holds import shims, tasks
from jobs import Training, start

LIMIT = 2  # s
LONG = 8.0  # s beyond that


def stop(training: Training, node: str, *, guardians: bool = False) -> list[int]:
    """Stop the node's robust-tasks."""
    pids = tasks(training, node) if guardians else shims(training, node)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def step_now(training: Training) -> int:
    return int(training.out().rpartition("\nstep ")[2].split()[0])


@pytest.mark.parametrize("per_node", [1, 2])
def test_stopped_agents_of_a_job_that_steps_on(new_lab: LabFactory, per_node: int) -> None:
    lab = new_lab(standby=1)
    robust = f"--robust-mute-limit={LIMIT}"
    training = start(lab, 2, per_node, spares=1, robust=robust, steps=500)
    training.wait_step(8)
    pids = stop(training, "n2")
    assert len(pids) == per_node
    training.wait_step(step_now(training) + int(LONG / 0.035))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    training.check_done()
    assert not training.incidents() and not training.accusations(), training.story()
    assert training.rosters()[-1]["epoch"] == 1
