"""Data-parallel ranks that do not stay alike: each is restored to what it held itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from ckpt_jobs import undisturbed
from torch_forks import TorchForks

from lab import Cluster

pytest.importorskip("torch")


def test_ranks_that_diverge_save_all_of_their_own(
    lab: Cluster, torch_forks: TorchForks, tmp_path: Path
) -> None:
    model = undisturbed(torch_forks, "ckpt_local_sgd.py", tmp_path, 2, 14)
    training = model.job(lab)
    size = ["-N2", "--ntasks-per-node=1"]
    training.start("", "--hold=1:9 --pause=0.3", sbatch=size, durable=False)
    training.wait_held(1, 9)
    training.wait_replicas(8)
    training.kill(model.program, rank=1)
    training.check_ended()
    assert training.resumed() == [0, 8], training.story()
    training.check_lost(1)
    (event,) = training.events("unshared")
    assert event["ranks"] == [0, 1]
    assert training.says("^robust-srun: checkpoints: ranks that shared their state no longer hold")
