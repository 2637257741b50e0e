"""Frameworks on a GPU, which ranks of two nodes share: one is killed, all comes from memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from ckpt_jobs import WAIT, Undisturbed, survivors
from extras import needs

from lab import Cluster

WORLD, STEPS = 2, 9
SIZE = [f"-N{WORLD}", "--ntasks-per-node=1"]
on_gpu = pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU here")


@on_gpu
@pytest.mark.parametrize(
    "framework",
    [pytest.param(e, marks=needs(e, "frameworks")) for e in ("lightning", "transformers")],
)
def test_a_rank_killed(lab: Cluster, framework: str) -> None:
    """All is as in a quiet run, which is in the lab too: NCCL joins two hosts there."""
    model = Undisturbed(f"fw_{framework}.py", WORLD, STEPS, ["--device=cuda"], [])
    quiet = model.job(lab)
    quiet.start("", "--bare", sbatch=SIZE, durable=False)
    assert quiet.wait_end(WAIT) == 0, quiet.story()
    curves = [survivors(quiet.lines(rank)) for rank in quiet.ranks]
    training = model._replace(curves=curves).job(lab)
    kill = f"1:{random.randrange(2, STEPS)}:{random.randrange(WORLD)}"
    training.start("", f"--kill={kill}", sbatch=SIZE, durable=False)
    training.check_ended()
    (record,) = training.check_lost(1)
    assert record["restored"], (kill, record)
