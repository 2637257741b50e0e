"""FSDP2 under robust-srun: shards in memory, and on disk when the job must be requeued."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_jobs import WAIT, CheckpointJob, Undisturbed, undisturbed
from conftest import LabFactory
from torch_forks import TorchForks


@pytest.fixture(scope="module")
def fsdp(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("fsdp")
    return undisturbed(torch_forks, "ckpt_fsdp.py", directory, world=2, steps=16)


def room_is_mapped(training: CheckpointJob) -> bool:
    tasks = training.processes("srun_wrapper.agent.task")
    return any("/.room-" in Path(f"/proc/{task.pid}/maps").read_text() for task in tasks)


def test_rank_killed_then_nodes_lost_until_requeued(new_lab: LabFactory, fsdp: Undisturbed) -> None:
    """Without another node the newest step is written to disk before the job leaves its nodes."""
    lab = new_lab(nodes=3, standby=0)
    training = fsdp.job(lab)
    options = "--kill=1:6:0 --hold=2:11"
    training.start("--robust-standby-partition=", options, sbatch=["-N2", "--ntasks-per-node=1"])
    training.wait_held(2, 11)
    training.wait_replicas(10)
    lab.crash("n2")
    training.until(lambda: len(training.starts()) == 3, "second run of the job", WAIT)
    training.check_ended()
    assert training.resumed() == [0, 5, 10], training.story()
    killed, lost = training.incidents()
    assert (killed["action"], killed["outcome"]) == ("restart", "recovered")
    assert killed["lost_steps"] <= 1
    assert (lost["action"], lost["outcome"]) == ("requeue", "requeued")
    assert lab.job(training.job)["Restarts"] == "1"
    assert training.says(r"^robust-srun: checkpoints: step 10 is on disk in ")


def test_shards_of_a_lost_node_come_from_their_replicas(
    new_lab: LabFactory, fsdp: Undisturbed
) -> None:
    lab = new_lab(nodes=3, standby=0)
    training = fsdp.job(lab)
    size = ["-N3", "--ntasks-per-node=1"]
    training.start("--robust-spares=1", "--hold=1:7", sbatch=size, durable=False)
    training.wait_held(1, 7)
    training.wait_replicas(6)
    training.until(lambda: room_is_mapped(training), "room on the spare for what it would fetch")
    lab.crash("n2")
    training.check_ended()
    assert training.resumed() == [0, 6], training.story()
    (lost,) = training.check_lost(1)
    assert (lost["action"], lost["swaps"]) == ("swap_spare", [["n2", "n3"]])
