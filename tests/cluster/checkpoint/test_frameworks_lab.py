"""Lightning and transformers, two ranks (DDP) under robust-srun, one killed: all from memory."""

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


@pytest.fixture
def forks(framework: str) -> Iterator[TorchForks]:
    """Programs with the framework imported already: for the undisturbed run."""
    module = {"lightning": "lightning.pytorch", "transformers": "transformers.trainer"}[framework]
    with TorchForks(module, "torchdata.stateful_dataloader") as forks:
        yield forks


@pytest.mark.parametrize(
    "framework",
    [pytest.param(each, marks=needs(each, "frameworks")) for each in ("lightning", "transformers")],
)
def test_a_rank_killed(lab: Cluster, forks: TorchForks, framework: str, tmp_path: Path) -> None:
    """In any step; all is as in a quiet run: losses, data, state.

    Which steps are at an epoch's end, and what is done there, is for tests of one process.
    """
    training = undisturbed(forks, f"fw_{framework}.py", tmp_path, 2, STEPS).job(lab)
    kill = f"1:{random.randrange(2, STEPS)}:{random.randrange(2)}"
    training.start("", f"--kill={kill}", sbatch=["-N2", "--ntasks-per-node=1"], durable=False)
    training.check_ended()
    (record,) = training.check_lost(1)
    assert record["restored"], (kill, record)
