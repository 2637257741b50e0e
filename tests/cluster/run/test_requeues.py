"""Jobs that go back to the queue for other reasons than a lost node: preempted, MPI worlds."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
from conftest import LabFactory
from jobs import Training, prepared, start

from lab import Cluster

PROGRAMS = Path(__file__).parents[2] / "programs"
LIBRARIES = Path("/usr/lib", str(sysconfig.get_config_var("MULTIARCH")))
# Slurm's PMIx plugin opens the name without a number.
OPEN_MPI = all((LIBRARIES / name).exists() for name in ("libmpi.so.40", "pmix2/lib/libpmix.so"))


@pytest.fixture
def low(new_lab: LabFactory) -> Cluster:
    """A lab with a partition whose jobs give way to those of ``train``."""
    lab = new_lab(nodes=2, standby=0, PreemptType="preempt/partition_prio", PreemptMode="CANCEL")
    for order in (
        "update PartitionName=train PriorityTier=10",
        "create PartitionName=low Nodes=n[1-2] PriorityTier=1 GraceTime=40 State=UP",
    ):
        lab.exec("head", ["scontrol", *order.split()], check=True, user=False)
    return lab


def test_a_preempted_job_goes_on_after_the_other(low: Cluster) -> None:
    """With PreemptMode=CANCEL Slurm would end it for good; it gives its nodes back at once."""
    robust = "--robust-requeue-on=TERM"
    training = start(low, 2, robust=robust, sbatch="-p low", steps=20, toy="--hold 11")
    training.wait_step(11)
    other = low.sbatch("#!/bin/sh\nsleep 1\n", ["-p", "train", "-N2", "--exclusive"])
    training.wait_says("^robust-srun: SIGTERM: the job is requeued$")
    low.wait_job(other, "COMPLETED", 30)
    training.check_done()
    assert low.job(training.job)["Restarts"] == "1"
    assert len(training.runs()) == 2 and not training.incidents() and not training.accusations()


def mpi_world(lab: Cluster, kind: str, program: str, *words: str) -> Training:
    """Start an MPI program in place of the toy."""
    training = prepared(lab, 2, steps=20)
    command = f"python {PROGRAMS / program} {training.dir} {training.steps} {' '.join(words)}"
    training.submit(f"robust-srun --mpi={kind} {command}", ["-N2"])
    return training


def test_an_mpi_world_is_requeued_without_the_lost_node(new_lab: LabFactory) -> None:
    """No MPI is needed: the program speaks the words of MPI_Init and a barrier."""
    lab = new_lab(nodes=3, standby=0)
    training = mpi_world(lab, "pmi2", "pmi2_world.py", "--hold=8")
    training.wait_step(8)
    lab.crash("n2")
    training.wait_says("^robust-srun: .*MPI world .*: the job is requeued without n2$")
    training.until(lambda: len(training.runs()) > 1, "second run", 40)
    assert training.wait_end() == 0, training.story()
    assert training.says("^robust-srun: warning: --mpi=pmi2 makes one MPI world of the ranks")
    assert training.runs() == [["n1", "n2"], ["n1", "n3"]]
    training.only_incident(action="requeue", outcome="requeued", suspects=["n2"])
    assert training.says("^step 20 of a world of 2$")


@pytest.mark.skipif(not OPEN_MPI, reason="libopenmpi3 or libpmix-dev is not installed")
def test_open_mpi_is_requeued_when_a_rank_dies(new_lab: LabFactory) -> None:
    """Slurm's PMIx plugin sees the death, too, and may end the step: the job is requeued first."""
    lab = new_lab(nodes=2, standby=0)
    training = mpi_world(lab, "pmix", "mpi_world.py", "--die=8")
    training.until(lambda: len(training.runs()) > 1, "second run", 40)
    assert training.wait_end() == 0, training.story()
    assert training.says("^robust-srun: warning: --mpi=pmix makes one MPI world of the ranks")
    training.only_incident(symptom="crash", action="requeue", outcome="requeued")
    assert training.says("^step 20 of a world of 2$")
