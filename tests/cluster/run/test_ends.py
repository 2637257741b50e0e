"""Jobs that are ended while something is wrong: who ends at once, and what stays behind."""

from __future__ import annotations

import os
import signal

from conftest import LabFactory
from jobs import Training, command_line, prepared, start

from lab import Cluster

KILL_WAIT = 120  # s until Slurm kills: nobody may need it


def on(training: Training, node: str) -> list[int]:
    """The job's tasks on a node."""
    return [
        p.pid
        for p in training.processes()
        if p.environ.get("SLURMD_NODENAME") == node and "SLURM_PROCID" in p.environ
    ]


def test_scancel_while_a_node_hangs(new_lab: LabFactory) -> None:
    """Nodes that answer end at once, and leave nothing; the other one when it lives again."""
    lab = new_lab(nodes=3, standby=0, KillWait=KILL_WAIT)
    training = start(lab, 3, toy="--hold 8")
    training.wait_step(8)
    lab.hang("n3")
    lab.exec("head", ["scancel", str(training.job)], check=True)
    training.until(lambda: not on(training, "n1") and not on(training, "n2"), "the end", 15.0)
    assert not training.in_memory()
    assert not training.incidents() and not training.says("Traceback .*\\n.*srun_wrapper")
    lab.ask("heal", node="n3")  # and no waiting until Slurm uses it again
    training.until(lambda: not training.processes(), "the end on n3", 30.0)
    training.until(lambda: not training.in_memory(), "empty memory of n3")


def test_robust_srun_and_srun_are_killed_at_once(new_lab: LabFactory) -> None:
    """The job ends; the agents end before Slurm's SIGKILL, which would leave what they keep."""
    lab = new_lab(nodes=2, standby=0, KillWait=4)
    training = start(lab, 2, toy="--hold 8")
    training.wait_step(8)
    assert training.in_memory().keys() == {"n1", "n2"}
    # Stopped first: when its parent dies, srun kills the step.
    sruns = [p.pid for p in training.processes("srun ") if command_line(p.pid).startswith("srun ")]
    victims = [*sruns, *(p.pid for p in training.processes("bin/robust-srun "))]
    assert len(victims) == 3  # srun has a second process, which kills the step as well
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        for pid in victims:
            os.kill(pid, signum)
    training.wait_end()
    training.check_gone()
    assert not training.in_memory(), training.story()


def test_an_srun_that_was_killed_is_named(lab: Cluster) -> None:
    """The job ends with it once robust-srun has begun again three times; Slurm did not end it."""
    training = prepared(lab, 2)
    line = training.line([], ["--hold", "8"])
    training.submit(f"export ROBUST_SRUN_TIMES=3\n{line}", ["-N2", "--ntasks-per-node=1"])
    training.wait_step(8)
    sruns = [p.pid for p in training.processes("srun ") if command_line(p.pid).startswith("srun ")]
    os.kill(min(sruns), signal.SIGKILL)  # its other process ends the step then
    assert training.wait_end() == 137, training.story()
    assert training.says(r"^robust-srun: srun \(pid \d+\) was killed by SIGKILL, and the job")
    assert "Slurm ended the step" not in training.out(), training.out()
