"""Durable checkpoints in another shape: in one process, of pipeline stages, of blocks."""

from __future__ import annotations

import re
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
from robust_slurm.checkpoint.capture.state import State
from robust_slurm.checkpoint.durable import reader
from robust_slurm.checkpoint.durable import tier as durable
from robust_slurm.checkpoint.durable.export import export
from robust_slurm.checkpoint.durable.files import DurableError


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


class Tied(torch.nn.Module):
    """One weight under three names, two of them in one module."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        torch.nn.init.constant_(self.embed.weight, value)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.second = torch.nn.ParameterDict({"w": self.embed.weight})

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(rows))


NAMES = ["embed.weight", "head.weight", "second.w"]


def saved_by(tmp_path: Path, objects: list[dict[str, Any]], **about: Any) -> list[Path]:
    """Return the snapshot files of ranks with these objects."""
    paths = []
    for rank, each in enumerate(objects):
        items, values = State(each, rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items]
        path = tmp_path / f"own-{rank}-0.safetensors"
        more = {"rank": rank, "world": len(objects), **about}
        paths.append(save_snapshot(path, pieces, values, **more))
    return paths


def a_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model(torch.arange(5)).square().sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_tied_weights_are_there_under_all_their_names(tmp_path: Path, tier: Path) -> None:
    torch.manual_seed(1)
    there = [Tied(0.5) for _ in range(2)]
    objects = [a_step(m, torch.optim.AdamW(m.parameters(), lr=0.1)) for m in there]
    where = store(tier, saved_by(tmp_path, objects))
    expected = there[0].embed.weight.detach()
    here = Tied(7.0)
    optimizer = torch.optim.AdamW(here.parameters(), lr=0.3)
    assert load_alone(tier, {"model": here, "optimizer": optimizer}) == []
    assert here.head.weight is here.embed.weight
    same(here.state_dict(), there[0].state_dict())
    same(
        *(
            each.state[each.param_groups[0]["params"][0]]
            for each in (optimizer, objects[0]["optimizer"])
        )
    )

    asked = {"model": Tied(7.0).state_dict()}
    torch.distributed.checkpoint.load(asked, checkpoint_id=where, no_dist=True)
    dcp_to_torch_save(where, tmp_path / "dcp.pt")
    export(where, tmp_path / "x.pt", "model")
    export(where, tmp_path / "x.safetensors", "model")
    from safetensors.torch import load_file

    for found in (
        asked["model"],
        torch.load(tmp_path / "dcp.pt", weights_only=True)["model"],
        torch.load(tmp_path / "x.pt", weights_only=True),
        load_file(tmp_path / "x.safetensors"),
    ):
        assert sorted(found) == NAMES
        assert all(torch.equal(found[name], expected) for name in NAMES)
        Tied(7.0).load_state_dict(found)


class Masters(torch.optim.Optimizer):
    """Keeps state of all kinds of types and shapes, as optimizers of 16-bit models do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch.manual_seed(3)
        for p in (p for group in self.param_groups for p in group["params"]):
            draw = torch.rand(p.shape) - 0.5
            self.state[p] = {
                "step": torch.tensor(3.0, dtype=torch.float64), "n": 3, "master": draw,
                "mask": draw > 0, "bits": (draw * 100).to(torch.int8), "f8": draw.to(
                    torch.float8_e4m3fn), "pair": torch.complex(draw, draw.double().float()),
                "scales": torch.rand(7), "wide": torch.complex(draw.double(), draw.double()),
                "bytes": torch.arange(6, dtype=torch.uint8), "empty": torch.zeros(0, 3),
            }  # fmt: skip
            p.copy_(draw)


def test_optimizer_state_keeps_its_types_whatever_that_of_the_parameter(
    tmp_path: Path, tier: Path
) -> None:
    """torch's load_state_dict() casts all of it to the parameter's type."""
    there = [Tied(0.5).bfloat16() for _ in range(2)]
    objects = [a_step(m, Masters(m.parameters())) for m in there]
    store(tier, saved_by(tmp_path, objects))
    here = Tied(7.0).bfloat16()
    optimizer = Masters(here.parameters())
    assert load_alone(tier, {"model": here, "optimizer": optimizer}) == []
    (saved,), (found,) = (each.state.values() for each in (objects[0]["optimizer"], optimizer))
    assert found.keys() == saved.keys()
    for name, value in saved.items():
        if isinstance(value, torch.Tensor):
            assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
            raw = (each.reshape(-1).contiguous().view(torch.uint8) for each in (found[name], value))
            assert torch.equal(*raw), name
        else:
            assert found[name] == value


def test_several_models_and_optimizers_and_what_is_in_extra(tmp_path: Path, tier: Path) -> None:
    def made(value: float) -> dict[str, Any]:
        models = {"g": Tied(value), "d": torch.nn.Linear(2, 2)}
        optimizers = {n: torch.optim.SGD(m.parameters(), lr=value) for n, m in models.items()}
        average = torch.optim.swa_utils.AveragedModel(models["d"])
        return {"model": models, "optimizer": optimizers, "extra.average": average}

    torch.manual_seed(4)
    there = made(0.5)
    for each in there["extra.average"].parameters():
        torch.nn.init.normal_(each)
    store(tier, saved_by(tmp_path, [there] * 3))
    here = made(7.0)
    assert load_alone(tier, here) == []
    for name in ("g", "d"):
        same(here["model"][name].state_dict(), there["model"][name].state_dict())
        assert here["optimizer"][name].param_groups[0]["lr"] == 0.5
    same(here["extra.average"].state_dict(), there["extra.average"].state_dict())


def test_what_the_ranks_had_otherwise_is_named_and_nothing_else(tmp_path: Path, tier: Path) -> None:
    """A needless warning hides the others."""

    def made(count: int) -> dict[str, Any]:
        model = torch.nn.BatchNorm1d(2)
        torch.nn.init.constant_(model.running_mean, count)
        drawn = torch.Generator().manual_seed(count)
        return {"model": model, "extra.gen": drawn, "extra.log": {"n": count}, "extra.same": [1]}

    store(tier, saved_by(tmp_path, [with_values(made(count)) for count in (1, 2)]))
    here = with_values(made(7))
    before = here["extra.gen"].get_state()
    said = load_alone(tier, here)
    assert here["model"].running_mean.tolist() == [1.0, 1.0]
    assert here["extra.log"].value == {"n": 1}
    assert torch.equal(here["extra.gen"].get_state(), before)
    differed = [re.search(r"by 1: (.*) differed between the ranks", line) for line in said]
    assert [m and m[1] for m in differed] == ["model.running_mean", "extra.log", "extra.gen"]


@pytest.mark.parametrize("alike", [True, False])
def test_plain_state_of_a_rank_s_own_rows_is_refused_by_name(
    alike: bool, tmp_path: Path, tier: Path
) -> None:
    """8-bit optimizers have it with fully_shard: one rank's would be taken for all rows."""
    model = torch.nn.Linear(3, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    paths = []
    for rank in range(2):
        optimizer.state[model.weight] = {"q": torch.full((4, 3), 5.0 if alike else float(rank))}
        items, values = State({"model": model, "optimizer": optimizer}, rank=rank).capture()
        pieces = [(item.entry, item.tensor) for item in items if "state" in item.entry.fqn]
        pieces.append(rows("model.weight", model.weight.detach(), 4 * rank, 4 * rank + 4, "block"))
        path = tmp_path / f"own-{rank}-0.safetensors"
        paths.append(save_snapshot(path, pieces, values, rank=rank, world=2))
    store(tier, paths)
    here = torch.nn.Linear(3, 8, bias=False)
    objects = {"model": here, "optimizer": torch.optim.SGD(here.parameters(), lr=0.1)}
    with pytest.raises((StateError, DurableError), match=r"optimizer\.state\.weight\.q"):
        load_alone(tier, objects)


class Value:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def with_values(objects: dict[str, Any]) -> dict[str, Any]:
    plain = (dict, list)
    return {k: Value(v) if isinstance(v, plain) else v for k, v in objects.items()}
