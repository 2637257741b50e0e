"""Jobs that go back to the queue for another reason than a lost node."""

from __future__ import annotations

import pytest
from conftest import LabFactory
from jobs import start

from lab import Cluster


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
