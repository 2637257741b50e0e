"""Durable steps of a pipeline whose stages have equal names and shapes, in another world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import save_snapshot
from durable_tiers import store

from robust_slurm.checkpoint.capture.state import State
from robust_slurm.checkpoint.training.mesh import RankIds
from robust_slurm.checkpoint.training.resuming import CheckpointError, from_durable


def made(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


@pytest.mark.parametrize(
    ("mesh", "loads"),
    [
        ({"pp": 2, "dp": 1}, False),
        ({}, False),  # nobody says what they were
        ({"dp": 2}, True),  # replicas that have drifted apart: those of rank 0
    ],
)
def test_another_stage_of_a_pipeline_is_never_loaded(
    mesh: dict[str, int], loads: bool, tmp_path: Path, tier: Path
) -> None:
    """Four ranks load what two have saved; rank 3 would get the weights of stage 0."""
    paths = []
    for rank in range(2):
        items, values = State(made(50 + rank), rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        path = tmp_path / f"own-{rank}-0.safetensors"
        paths.append(save_snapshot(path, pieces, values, mesh=mesh, rank=rank, world=2))
    store(tier, paths)
    own = made(7)
    state, world = State(own, rank=3), RankIds(3, 4, 0, 1)
    if loads:
        assert from_durable(state, own, str(tier), world, {}, None, print) == 100
        assert own["model"].weight.unique().tolist() == [50]
        return
    with pytest.raises(CheckpointError, match="differs between the ranks that saved it"):
        from_durable(state, own, str(tier), world, {}, None, print)
    assert own["model"].weight.unique().tolist() == [7]
