"""Our own processes are stopped (SIGSTOP) while the ranks step on: no node is lost nor blamed."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
from conftest import LabFactory
from holds import shims, tasks
from jobs import Training, reference, start

LIMIT = 5  # s
LONG = 10.0  # s


def stop(training: Training, node: str, *, guardians: bool = False) -> list[int]:
    """Stop the node's robust-tasks."""
    pids = tasks(training, node) if guardians else shims(training, node)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def step_now(training: Training) -> int:
    return int(training.out().rpartition("\nstep ")[2].split()[0])


@pytest.mark.parametrize("per_node", [1, 2])
def test_a_node_whose_robust_tasks_are_stopped_stays_while_the_job_steps(
    new_lab: LabFactory, per_node: int
) -> None:
    lab = new_lab()
    robust = f"--robust-mute-limit={LIMIT}"
    training = start(lab, 2, per_node, spares=1, robust=robust, steps=600)
    training.wait_step(30)
    pids = stop(training, "n2", guardians=True)
    training.wait_step(step_now(training) + int(LONG / 0.035))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    training.check_done()
    assert not training.incidents() and not training.accusations(), training.story()
    assert training.rosters()[-1]["epoch"] == 1
    said = [line for line in training.out().splitlines() if "has been silent for" in line]
    assert len(said) == 1 and "robust-task on n2" in said[0], training.story()
    assert "the job steps on" in said[0] and "kill -CONT" in said[0]
    assert training.says("^robust-srun: n2 is heard again after ")


def test_a_stopped_robust_task_is_continued_by_its_guardian(new_lab: LabFactory) -> None:
    """The job would not see its ranks end, and their stderr would block."""
    lab = new_lab(nodes=2, standby=0)
    training = start(lab, 2, steps=200)
    training.wait_step(30)
    stop(training, "n1")
    training.check_done()
    assert not training.incidents() and not training.accusations(), training.story()
    assert training.says(
        "^robust-task: n1: the robust-task of local task 0 was stopped for 10 s .SIGSTOP.; "
    )


def test_a_recovery_does_not_wait_for_a_stopped_robust_task_nor_blame_its_node(
    new_lab: LabFactory,
) -> None:
    lab = new_lab()
    robust = f"--robust-mute-limit={LIMIT}"
    training = start(lab, 2, spares=1, robust=robust, steps=600)
    training.wait_step(30)
    pids = stop(training, "n2", guardians=True)
    training.wait_says("has been silent for")
    training.kill("toy.py", rank=0)
    training.wait_says("recovered from")
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert training.wait_end() == 0, training.story()
    assert training.final() == {"step": training.steps, "loss": reference(training.steps, 2)}
    training.check_gone()  # what Slurm's SIGKILL leaves in memory there is the epilog's
    assert training.incidents()[-1]["swaps"] == [["n2", "n3"]], training.story()
    assert not training.accusations(), training.story()
