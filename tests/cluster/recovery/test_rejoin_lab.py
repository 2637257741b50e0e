"""A rank of three in ``resilient()`` has a fault: the others keep their processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_jobs import CheckpointJob, Undisturbed, undisturbed
from torch_forks import TorchForks

from lab import Cluster

WORLD, STEPS = 3, 20
FAULTS = "1:5:1:kill,2:9:0:raise,3:13:2:stop"  # EPOCH:STEP:RANK:WHAT


@pytest.fixture(scope="module")
def model(torch_forks: TorchForks, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    directory = tmp_path_factory.mktemp("rejoin")
    return undisturbed(torch_forks, "ckpt_rejoin.py", directory, WORLD, STEPS)


def pids(training: CheckpointJob, rank: int) -> list[str]:
    return Path(training.dir / f"pids-{rank}").read_text().split()


def test_only_the_rank_with_the_fault_is_new(lab: Cluster, model: Undisturbed) -> None:
    """Killed, ended by an exception (rank 0, which has the store), stopped while the others wait
    for it. What is computed is the same to the last bit."""
    training = model.job(lab)
    sbatch = ["-N3", "--ntasks-per-node=1"]
    training.start("--robust-hang-floor=2", f"--fault={FAULTS}", sbatch=sbatch, durable=False)
    training.check_ended()
    records = training.check_lost(3)
    assert [record["symptom"] for record in records] == ["crash", "crash", "hang"]
    assert [record["kept"] for record in records] == [2, 2, 2], training.story()
    assert [record["rung"] for record in records[:2]] == ["rejoin", "rejoin"]
    assert training.says("^robust-srun: recovered from crash .*; 2 of 3 ranks kept their process")
    for rank, fault in ((0, 2), (1, 1), (2, 3)):
        own = pids(training, rank)
        changed = [epoch for epoch in (1, 2, 3) if own[epoch - 1] != own[epoch]]
        assert changed == [fault], f"rank {rank}: {own}\n{training.story()}"
