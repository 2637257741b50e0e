"""A durable checkpoint whole, as one file of torch's or of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from durable_snapshots import (
    Net,
    data_parallel,
    save_world,
    sharded,
)
from durable_tiers import flat, same, store

from robust_slurm.checkpoint.durable.export import export
from robust_slurm.checkpoint.durable.files import DurableError


def test_export_as_safetensors(tmp_path: Path, tier: Path, trained_state: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    where = store(tier, save_world(tmp_path, trained_state, 3, data_parallel))
    out = tmp_path / "all.safetensors"
    done = export(where, out)
    found = load_file(out)
    assert done == (len(found), 0, out.stat().st_size, ())
    expected = {**flat(trained_state), "rng.torch": torch.arange(16, dtype=torch.uint8)}
    same(dict(sorted(found.items())), dict(sorted(expected.items())))
    export(where, tmp_path / "model.safetensors", "model")
    same(dict(sorted(load_file(tmp_path / "model.safetensors").items())),
         dict(sorted(trained_state["model"].items())))  # fmt: skip
    assert not list(tmp_path.glob(".*tmp"))


def test_what_torch_load_refuses_is_left_out_by_name(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any]
) -> None:
    state = {**trained_state, "extra": {"order": numpy.arange(3), "note": "kept"}}
    where = store(tier, save_world(tmp_path, state, 1, sharded))
    done = export(where, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt")
    assert done.left_out == ("extra.order",)
    assert whole["extra"] == {"note": "kept"}


def test_export_as_pt(tmp_path: Path, tier: Path, trained_state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, trained_state, 2, sharded))
    export(where, tmp_path / "all.pt")
    whole = torch.load(tmp_path / "all.pt", weights_only=True)
    same(flat(whole), flat(trained_state))
    assert whole["optimizer"]["param_groups"] == trained_state["optimizer"]["param_groups"]
    export(where, tmp_path / "model.pt", "model")
    model = Net()
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    same(dict(model.state_dict()), trained_state["model"])
    with pytest.raises(DurableError, match="no tensors under 'modle'"):
        export(where, tmp_path / "x.pt", "modle")
