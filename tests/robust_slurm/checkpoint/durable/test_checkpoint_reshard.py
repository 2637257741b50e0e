"""Durable checkpoints in another shape: in one process, of pipeline stages, of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    rows,
    save_snapshot,
    save_world,
    sharded,
    state_of,
    tensors_of,
    trained,
)
from durable_tiers import Position, flat, load_alone, same, store
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from robust_slurm.checkpoint.capture.assembly import StateError
from robust_slurm.checkpoint.durable import reader
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.export import export


@pytest.mark.parametrize("cut", [data_parallel, sharded])
@pytest.mark.parametrize("world", [1, 3, 4])
def test_resharding_into_one_process(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any], cut: Any, world: int
) -> None:
    store(tier, save_world(tmp_path, trained_state, world, cut))
    model, optimizer = trained(5)
    objects = {"model": model, "optimizer": optimizer, "loader": Position(), "rng": None}
    drawn = torch.get_rng_state()
    said = load_alone(tier, objects)
    same(flat(state_of(model, optimizer)), flat(trained_state))
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.95)
    assert ["generators" in said[0], "loaders" in said[1]] == [True] * len(said), said
    assert torch.equal(torch.get_rng_state(), drawn)


def test_what_the_checkpoint_lacks_is_named(
    tmp_path: Path, tier: Path, trained_state: dict[str, Any]
) -> None:
    store(tier, save_world(tmp_path, trained_state, 2, sharded))
    more, wide = trained(5), trained(5, 12)
    more[0].other = torch.nn.Linear(2, 2)
    rest = {"loader": Position(), "rng": None}
    with pytest.raises(StateError, match=r"model: the snapshot lacks other\.weight"):
        load_alone(tier, {"model": more[0], "optimizer": more[1], **rest})
    with pytest.raises(StateError, match=r"model\.first\.weight: saved with shape \[10, 6\]"):
        load_alone(tier, {"model": wide[0], "optimizer": wide[1], **rest})
    with pytest.raises(StateError, match="only the snapshot has optimizer"):
        load_alone(tier, {"model": trained(5)[0], **rest})


def stages(tmp_path: Path, *, one_name: bool) -> list[Path]:
    """dp 2 x pp 2: two models, each divided between two ranks."""
    models = [trained(seed) for seed in (1, 2)]
    paths = []
    for rank in range(4):
        stage = rank % 2
        whole = state_of(*models[stage])
        if not one_name:
            state = whole["optimizer"]["state"]
            whole = {
                "model": {f"s{stage}.{k}": v for k, v in whole["model"].items()},
                "optimizer": {
                    "state": {f"s{stage}.{k}": v for k, v in state.items()},
                    "param_groups": [
                        {**g, "params": [f"s{stage}.{n}" for n in g["params"]]}
                        for g in whole["optimizer"]["param_groups"]
                    ],
                },
            }
        found, kept = tensors_of(whole)
        peers = (stage, stage + 2)
        paths.append(
            save_snapshot(
                tmp_path / f"own-{rank}",
                data_parallel(found, rank, peers),
                kept,
                rank=rank,
                world=4,
                mesh={"dp": 2, "pp": 2},
                needs=peers,
            )
        )
    return paths


def test_stages_of_one_name_are_kept_apart(tmp_path: Path, tier: Path) -> None:
    where = store(tier, stages(tmp_path, one_name=True))
    manifest = durable.read_manifest(where)
    renamed = {r.name: r for r in manifest.renamed}
    assert renamed["model.first.weight@1"].ranks == (1, 3)
    assert renamed["model.first.weight@1"].fqn == "model.first.weight"
    assert not any("running" in name for name in renamed)
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    for stage in (0, 1):
        expected = state_of(*trained(stage + 1))["model"]
        for name in ("first.weight", "last.bias", "norm.running_var"):
            got = whole[f"model.{name}@1"] if stage else whole["model"][name]
            assert torch.equal(got, expected[name])
    for rank in range(4):
        (own, peer) = reader.load(tier, 100, rank, 4, {"dp": 2, "pp": 2})
        expected = state_of(*trained(rank % 2 + 1))["model"]["first.weight"]
        lower, upper = sorted((own, peer), key=lambda each: each.snapshot.rank)
        got = [each.tensors["model.first.weight"] for each in (lower, upper)]
        assert torch.equal(torch.cat(got), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_stages_of_their_own_names_load_as_torch_flattens_them(tmp_path: Path, tier: Path) -> None:
    where = store(tier, stages(tmp_path, one_name=False))
    for stage in (0, 1):
        expected = state_of(*trained(stage + 1))
        asked = {
            "model": {f"s{stage}.{n}": torch.zeros_like(t) for n, t in expected["model"].items()},
            "optimizer": {
                f"state.s{stage}.first.weight.exp_avg": torch.zeros(10, 6),
                f"param_groups.s{stage}.first.weight.lr": 0.0,
                f"param_groups.s{stage}.scale.weight_decay": 7.0,
            },
        }
        torch.distributed.checkpoint.load(asked, checkpoint_id=where, no_dist=True)
        for name, tensor in expected["model"].items():
            assert torch.equal(asked["model"][f"s{stage}.{name}"], tensor)
        moments = expected["optimizer"]["state"]["first.weight"]["exp_avg"]
        got = asked["optimizer"]
        assert torch.equal(got[f"state.s{stage}.first.weight.exp_avg"], moments)
        assert got[f"param_groups.s{stage}.first.weight.lr"] == 0.01 + (stage + 1) / 1000
        assert got[f"param_groups.s{stage}.scale.weight_decay"] == 0.0


def test_blocks_in_two_dimensions(tmp_path: Path, tier: Path) -> None:
    whole = torch.arange(48.0).reshape(6, 8)
    kept = {"model": {"d": {"w": {"T": "model.w"}}}}
    paths = []
    for rank in range(4):
        half = whole[:, rank % 2 * 4 : rank % 2 * 4 + 4]
        entry, block = rows("model.w", half, rank // 2 * 3, rank // 2 * 3 + 3, "block")
        entry = entry._replace(global_shape=(6, 8), offsets=(rank // 2 * 3, rank % 2 * 4))
        paths.append(
            save_snapshot(tmp_path / f"own-{rank}", [(entry, block)], kept, rank=rank, world=4)
        )
    where = store(tier, paths)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(6, 8))
    assert load_alone(tier, {"model": model}) == []
    assert torch.equal(model.w, whole)
    export(where, tmp_path / "x.safetensors")
    from safetensors.torch import load_file

    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.w"], whole)
