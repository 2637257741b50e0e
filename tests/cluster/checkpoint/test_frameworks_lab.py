"""Real frameworks, two ranks on two nodes under robust-srun, one killed: all from memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from ckpt_jobs import undisturbed
from extras import needs
from torch_forks import TorchForks

from lab import Cluster

STEPS = 9
IMPORTS = {
    "lightning": ("lightning.pytorch", "torchdata.stateful_dataloader"),
    "transformers": ("transformers.trainer", "torchdata.stateful_dataloader"),
    "torchtitan": ("torch._dynamo", "datasets", "tensorboard"),
    "megatron": ("megatron.core.distributed", "megatron.core.optimizer"),
}
"""Framework → what is imported already where the undisturbed run is forked from."""
PACKAGES = {"megatron": "megatron.core"}


@pytest.fixture
def forks(framework: str) -> Iterator[TorchForks]:
    with TorchForks(*IMPORTS[framework]) as forks:
        yield forks


@pytest.mark.parametrize(
    "framework",
    [pytest.param(each, marks=needs(PACKAGES.get(each, each), "frameworks")) for each in IMPORTS],
)
def test_a_rank_killed(lab: Cluster, forks: TorchForks, framework: str, tmp_path: Path) -> None:
    """In any step; all is as in a quiet run: losses, data, state.

    Lightning and transformers train with DDP, torchtitan with FSDP2, Megatron with its
    DistributedOptimizer. Which steps are at an epoch's end, and what is done there, is for tests
    of one process.
    """
    training = undisturbed(forks, f"fw_{framework}.py", tmp_path, 2, STEPS).job(lab)
    kill = f"1:{random.randrange(2, STEPS)}:{random.randrange(2)}"
    training.start("", f"--kill={kill}", sbatch=["-N2", "--ntasks-per-node=1"], durable=False)
    training.check_ended()
    (record,) = training.check_lost(1)
    assert record["restored"], (kill, record)
