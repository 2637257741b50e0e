"""A standby node that waits warm for a training: taken back, used, and ended with its job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import Training, start
from pool_lab import Pool
from waiting import until

from lab import Cluster

PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
ALL_OF_IT = ["srun", "-Q", "-p", "standby", "--exclusive", "--mem=0", "-N1", "-n1"]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Cluster(nodes=4, standby=0, slurm_conf=PREEMPTION) as lab:
        found = Pool(lab, "n3", "n4")
        words = ["--nodes", "n[3-4]", "--from", "train", "--lease", "lease"]
        found.run("apply", "--yes", *words)
        yield found


def in_partition(lab: Cluster, partition: str) -> list[str]:
    """The nodes of the running jobs of a partition."""
    argv = ["squeue", "-h", "-a", "-t", "R", "-p", partition, "-o", "%N"]
    return lab.exec("head", argv, check=True).stdout.split()


def lease(training: Training, lab: Cluster) -> str:
    """Wait for the node that waits warm for the training."""

    def warm() -> list[str]:
        rosters = training.rosters()
        nodes = rosters[-1]["nodes"] if rosters else []
        return [n["name"] for n in nodes if n["role"] == "spare" and n["warm"] == 2]

    def waits() -> bool:
        return bool(warm()) and set(warm()) <= set(in_partition(lab, "lease"))

    training.until(waits, "a warm lease")
    return warm()[0]


def test_a_lease(pool: Pool) -> None:
    lab = pool.lab
    robust = "--robust-warm --robust-hang-floor=300"
    training = start(lab, 2, 2, toy="--step-time=0.1 --hold 10", steps=2000, robust=robust)
    training.wait_step(10)
    leased = lease(training, lab)
    assert pool.use()[leased] == f"leased by job {training.job}"
    stock = pool.show(0)["stock"]
    assert (stock["free"], stock["leased"], stock["short"]) == (2, 1, 0)

    # Whoever asks for its node has it at once, and the training goes on as if nothing had been.
    lab.exec("head", [*ALL_OF_IT, "-w", leased, "--immediate=5", "true"], check=True)
    training.until(lambda: not in_partition(lab, "standby"), "its end")
    leased = lease(training, lab)
    assert not training.incidents() and not training.accusations()

    lab.crash("n2")
    training.wait_says(f"{leased} took the ranks of n2")
    training.until(lambda: in_partition(lab, "lease-held") == [leased], "the node is kept")
    record = training.only_incident(action="swap_standby", swaps=[["n2", leased]])
    assert (record["warm"], record["ranks"]) == (4, 4)
    assert pool.use()[leased].endswith(f"standby of job {training.job}")
    other = lease(training, lab)
    assert other != leased
    assert lab.exec("head", [*ALL_OF_IT, "-w", leased, "--immediate=2", "true"]).returncode
    assert set(in_partition(lab, "lease")) == {leased, other}

    training.kill("bin/robust-srun")
    ours = ("lease", "lease-held", "standby")
    until(lambda: not any(in_partition(lab, each) for each in ours), "no lease is left", 30)
