"""FSDP2 under robust-srun: shards in memory, and on disk when the job must be requeued."""

from __future__ import annotations

import pytest
from ckpt_jobs import WAIT, Undisturbed, undisturbed
from conftest import LabFactory


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("fsdp")
    return undisturbed("ckpt_fsdp.py", directory, world=2, steps=16)


@pytest.mark.timeout(400)
def test_rank_killed_then_nodes_lost_until_requeued(new_lab: LabFactory, fsdp: Undisturbed) -> None:
    """Each shard from its rank's memory or its replica; at last, without another node, from disk.

    Then the newest step is written to disk before the job leaves its nodes.
    """
    lab = new_lab(nodes=5, standby=0)
    training = fsdp.job(lab)
    options = "--kill=1:4:0 --hold=2:7,3:11"
    robust = "--robust-spares=1 --robust-standby-partition="
    training.start(robust, options, sbatch=["-N3", "--ntasks-per-node=1"])
    for epoch, step, node in ((2, 7, "n2"), (3, 11, "n3")):  # a rank's node, then its spare
        training.wait_held(epoch, step)
        training.wait_replicas(step - 1)
        lab.crash(node)
    training.until(lambda: len(training.starts()) == 4, "second run of the job", WAIT)
    training.check_ended()
    assert training.resumed() == [0, 3, 6, 10], training.story()
    killed, spared, lost = training.incidents()
    assert (killed["action"], killed["outcome"]) == ("restart", "recovered")
    assert (spared["action"], spared["swaps"]) == ("swap_spare", [["n2", "n3"]])
    assert killed["lost_steps"] <= 1 and spared["lost_steps"] <= 1
    assert (lost["action"], lost["outcome"]) == ("requeue", "requeued")
    assert [event["tier"] for event in training.events("restore")] == ["memory", "memory", "shared"]
    assert lab.job(training.job)["Restarts"] == "1"
    assert training.says(r"^robust-srun: checkpoints: step 10 is on disk in ")
