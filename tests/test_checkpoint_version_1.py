"""A checkpoint as robust-slurm wrote it before parts had a form (version 1): it is still read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from robust_slurm.checkpoint import durable, reader
from robust_slurm.checkpoint.cli import main
from robust_slurm.checkpoint.export import export

DATA = Path(__file__).parent / "data" / "checkpoint-version-1"
STEP = durable.step_dir(DATA, 100)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_gets_its_own_back(rank: int) -> None:
    (mine,) = reader.load(DATA, 100, rank, 2, {})
    assert torch.equal(mine.tensors["model.w"], torch.arange(20.0).reshape(10, 2)[5 * rank :][:5])
    assert mine.tensors["optimizer.state.w.step"] == 3
    assert (mine.snapshot.rank, mine.snapshot.step) == (rank, 100)


def test_it_is_verified_and_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(DATA)]) == 0
    export(STEP, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(whole["model"]["w"], torch.arange(20.0).reshape(10, 2))
    assert whole["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_damage_is_found(tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "tier")
    file = durable.step_dir(tmp_path / "tier", 100) / "77.e0-1_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[2000] ^= 1
    file.write_bytes(raw)
    with pytest.raises(durable.DurableError, match=r"77\.e0-1_0\.distcp"):
        reader.load(tmp_path / "tier", 100, 1, 2, {})
