"""Ranks that start warm: in place, on a spare, beside a standby node; nothing is left of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conftest import LabFactory
from jobs import Training, command_line, start
from waiting import until

from lab import Cluster
from lab.keeper.ranks import scan

SLOW = "--step-time=0.1"
WARM = "--robust-warm --robust-hang-floor=300"  # to be held is no hang


def warm(training: Training) -> dict[str, int]:
    """Node → ranks that would start warm."""
    nodes: list[dict[str, Any]] = training.rosters()[-1]["nodes"] if training.rosters() else []
    return {node["name"]: node["warm"] for node in nodes if node["role"] in ("active", "spare")}


def wait_warm(training: Training, **nodes: int) -> None:
    training.until(lambda: warm(training) == nodes, f"{nodes} warm, there is {warm(training)}")


def interpreters(training: Training) -> list[int]:
    """Return the interpreters that wait below the job's shims."""
    tasks = {process.pid for process in training.processes("srun_wrapper.agent.task")}
    return [p.pid for p in scan() if p.ppid in tasks and waits(p.pid)]


def waits(pid: int) -> bool:
    return command_line(pid).startswith("robust-warm:")


def pid_in_node(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (found,) = [line.split()[-1] for line in lines if line.startswith("NSpid:")]
    return int(found)


def test_killed_ranks_start_warm(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy=f"{SLOW} --hold 10,20", steps=30, robust=WARM)
    for kill in (1, 2):
        training.wait_step(10 * kill)
        wait_warm(training, n1=2, n2=2)
        both = lambda: len(interpreters(training)) == 8  # noqa: E731
        training.until(both, "interpreters, and a stand-in of each")
        waiting = interpreters(training)
        training.kill("toy.py", rank=kill)
        training.until(lambda: len(training.incidents()) == kill, "recovery")  # noqa: B023
    training.check_done()
    for record in training.incidents():
        assert (record["action"], record["warm"], record["ranks"]) == ("restart", 4, 4), record
    assert training.says("^robust-srun: recovered from crash .*; 4 of 4 ranks started warm")
    until(lambda: not any(map(waits, waiting)), "end of the warm interpreters")


def test_ranks_start_warm_on_a_spare_and_beside_a_standby_node(new_lab: LabFactory) -> None:
    lab = new_lab(nodes=3, standby=1)
    training = start(lab, 2, 2, toy=f"{SLOW} --hold 10,20,30", spares=1, robust=WARM)
    training.wait_step(10)
    wait_warm(training, n1=2, n2=2, n3=2)
    lab.crash("n2")
    training.wait_says("n3 took the ranks of n2")
    wait_warm(training, n1=2, n3=2)
    lab.crash("n3")
    training.wait_says("s1 took the ranks of n3")
    wait_warm(training, n1=2, s1=2)  # for the next time
    training.go_on()
    training.check_done()
    spare, standby = training.incidents()
    assert (spare["action"], spare["warm"], spare["ranks"]) == ("swap_spare", 4, 4)
    assert (standby["action"], standby["ranks"]) == ("swap_standby", 4)
    # n1's two. Those of s1, which has only just come, may be warm in time or not.
    assert 2 <= standby["warm"] <= 4


def test_standby_point_on_a_spare(new_lab: LabFactory) -> None:
    """The spare has run the script up to its standby point before it is needed."""
    lab = new_lab(nodes=3, standby=0)
    training = start(lab, 2, toy=f"{SLOW} --ahead --hold 10", steps=40, spares=1, robust=WARM)
    training.wait_step(10)
    wait_warm(training, n1=1, n2=1, n3=1)
    path = training.dir / "ahead.n3"
    training.until(lambda: path.exists() and path.read_text(), "the spare at its standby point")
    pid = int(path.read_text())
    lab.crash("n2")
    training.wait_says("n3 took the ranks of n2")
    assert [pid_in_node(p.pid) for p in training.processes("toy.py", rank=1)] == [pid]
    training.check_done()


def test_without_warm_starts(lab: Cluster) -> None:
    training = start(lab, 1, 2, toy=f"{SLOW} --fault kill --at 8", robust="--robust-no-warm")
    training.wait_step(6)
    assert not interpreters(training)
    training.check_done()
    assert training.only_incident(action="restart")["warm"] == 0


def test_two_jobs_and_one_standby(new_lab: LabFactory) -> None:
    """Both lose a node at once: one gets the standby, the other is queued without its bad node."""
    lab = new_lab(nodes=5, standby=1)
    options = {"robust": f"{WARM} --robust-standby-wait=8", "sbatch": "--exclusive"}
    jobs = [start(lab, 2, toy=f"{SLOW} --hold 5,20", **options) for _ in range(2)]
    for job in jobs:
        job.wait_step(5)
    lost = [sorted(warm(job))[1] for job in jobs]
    for name in lost:
        lab.crash(name)
    for job in jobs:
        job.until(job.incidents, "its incident")
    for job in jobs:
        job.go_on()
        job.until((job.dir / "final.json").exists, "end of the training", 200.0)
        job.wait_end()
    for job in jobs:
        job.check_done()
    actions = sorted(job.incidents()[-1]["action"] for job in jobs)
    assert actions == ["requeue", "swap_standby"]
