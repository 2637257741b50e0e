"""Independent tasks (--robust-no-rank-env): each is a program of its own, as under plain srun."""

from __future__ import annotations

from conftest import LabFactory
from jobs import Training, prepared

from lab import Cluster

TASK = """
import os, sys, time
from pathlib import Path
task = os.environ["SLURM_PROCID"]
worlds = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
found = [name for name in worlds if name in os.environ]
with open(f"began.{task}", "a") as file:
    print(os.environ["SLURM_NTASKS"], *found, file=file)
if task == "2" and "fail" in sys.argv:
    sys.exit(3)
while "wait" in sys.argv and not Path("go").exists():
    time.sleep(0.05)
Path(f"done.{task}").touch()
"""
SIZE = ["-N4", "--ntasks-per-node=1"]


def sweep(lab: Cluster, words: str) -> Training:
    training = prepared(lab, 4)
    (training.dir / "task.py").write_text(TASK)
    training.submit(f"exec robust-srun --robust-no-rank-env python task.py {words}", SIZE)
    return training


def began(training: Training) -> list[str]:
    return [path.read_text() for path in sorted(training.dir.glob("began.*"))]


def done(training: Training) -> list[str]:
    return sorted(path.suffix[1:] for path in training.dir.glob("done.*"))


def test_four_tasks_know_no_world_and_one_that_fails_ends_alone(lab: Cluster) -> None:
    training = sweep(lab, "fail")
    assert training.wait_end() == 3, training.story()
    assert began(training) == ["4\n"] * 4  # once each, and no RANK
    assert done(training) == ["0", "1", "3"]
    assert not training.incidents() and not training.accusations(), training.story()
    training.check_gone()
    assert not training.in_memory()


def test_the_task_of_a_lost_node_ends_and_the_others_run_on(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=4, standby=1)
    training = sweep(lab, "wait")
    training.until(lambda: len(began(training)) == 4, "all tasks")
    lab.crash("n3")
    training.wait_says(
        r"^robust-srun: .*n3.*: task 2 counts as killed \(exit code 137\), the others"
    )
    (training.dir / "go").touch()
    assert training.wait_end() == 137, training.story()
    assert began(training) == ["4\n"] * 4
    assert done(training) == ["0", "1", "3"]
    assert not training.incidents(), training.story()
    training.check_gone()
