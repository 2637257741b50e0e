"""Durable checkpoints in the hands of plain torch, in any shape, without robust_slurm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from durable_snapshots import (
    data_parallel,
    private,
    save_snapshot,
    save_world,
    sharded,
    tensors_of,
)
from durable_tiers import flat, same, store
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch_forks import TorchForks, all_end_well

from robust_slurm.checkpoint.capture import values
from robust_slurm.checkpoint.durable import reader
from robust_slurm.checkpoint.durable.export import export


def test_dcp_to_torch_save(tmp_path: Path, tier: Path, trained_state: dict[str, Any]) -> None:
    where = store(tier, save_world(tmp_path, trained_state, 3, data_parallel))
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(whole["model"], trained_state["model"])
    same(flat(whole), flat(trained_state))
    assert whole["optimizer"]["param_groups"] == trained_state["optimizer"]["param_groups"]
    assert whole["loader"]["position"] == 7
    assert whole["rng.torch@2"].shape == (16,)
    assert "model.norm.running_mean@2" not in whole  # as rank 0's: stored once


def test_states_that_do_not_fit_into_one_another(tmp_path: Path, tier: Path) -> None:
    """Names that clash within a rank or between ranks cost others the name, never the save."""
    extras: list[dict[str, Any]] = [
        {"extra.a": 3, "extra.l": [torch.ones(2), 1], "extra.g": {"h": torch.ones(1)}},
        {
            "extra.a": {"b": 4, "t": torch.ones(3)},
            "extra.l": {"x": 1},
            "extra.g": torch.ones(4),
            "extra.c": {"d.e": 1, "d": {"e": 2}},
            "extra.f": {1: "int", "1": "text"},
        },
    ]
    paths = []
    for rank, extra in enumerate(extras):
        found, kept = tensors_of(extra)
        pieces = [private(fqn, tensor) for fqn, tensor in found.items()]
        paths.append(save_snapshot(tmp_path / f"own-{rank}", pieces, kept, rank=rank, world=2))
    where = store(tier, paths)
    dcp_to_torch_save(where, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert whole["extra.a"].keys() == {"t", "b"}
    assert torch.equal(whole["extra.l"][0], torch.ones(2))
    assert whole["extra.l.x"] == 1
    assert whole["extra.g@1"].shape == (4,)
    export(where, tmp_path / "ours.pt")
    (loaded,) = reader.load(tier, 100, 1, 2, {})
    got = values.decode(loaded.snapshot.values["extra.c"], lambda ref: ref)
    assert got == {"d.e": 1, "d": {"e": 2}}


WITHOUT_US = """
import sys
sys.modules["robust_slurm"] = None  # importing it, or unpickling something of it, fails
import os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict,
    set_optimizer_state_dict)

kind, where, out, rendezvous, rank, world = *sys.argv[1:5], int(sys.argv[5]), int(sys.argv[6])
torch.manual_seed(3)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 10)
        self.norm = torch.nn.BatchNorm1d(10)
        self.last = torch.nn.Linear(10, 3)
        self.scale = torch.nn.Parameter(torch.tensor(9.0))

model = Net()
if kind != "single":
    dist.init_process_group("gloo", init_method="file://" + rendezvous, rank=rank, world_size=world)
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
if kind == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (world,))
    # A parameter without dimensions cannot be sharded: it stays a plain one.
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
plain = model.module if kind == "ddp" else model
large = [p for p in plain.parameters() if p.ndim > 1]
small = [p for p in plain.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": large}, {"params": small}], lr=0.5, foreach=False)
state = {"model": get_model_state_dict(model),
         "optimizer": get_optimizer_state_dict(model, optimizer)}
dcp.load(state, checkpoint_id=where)
set_model_state_dict(model, state["model"])
set_optimizer_state_dict(model, optimizer, state["optimizer"])
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
found = {"model": get_model_state_dict(model, options=whole),
         "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
         "lr": [g["lr"] for g in optimizer.param_groups]}
if rank == 0:
    torch.save(found, out)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # programs/teardown.py says why
"""


def load_without_us(
    forks: TorchForks, where: Path, scratch: Path, kind: str, world: int
) -> dict[str, Any]:
    out = scratch / "out.pt"
    argv = [kind, str(where), str(out), str(scratch / "rendezvous")]
    all_end_well([forks.start(WITHOUT_US, *argv, str(r), str(world)) for r in range(world)])
    found = torch.load(out, weights_only=True)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("cut", "saved", "kind", "world"),
    [
        (data_parallel, 3, "single", 1),
        (data_parallel, 3, "ddp", 2),
        (data_parallel, 2, "fsdp", 2),
        (sharded, 3, "fsdp", 2),
        (sharded, 4, "single", 1),
    ],
)
def test_plain_dcp_loads_it_without_us(
    torch_forks: TorchForks,
    tmp_path: Path,
    tier: Path,
    trained_state: dict[str, Any],
    cut: Any,
    saved: int,
    kind: str,
    world: int,
) -> None:
    where = store(tier, save_world(tmp_path, trained_state, saved, cut))
    found = load_without_us(torch_forks, where, tmp_path, kind, world)
    same(found["model"], trained_state["model"])
    same(flat(found), flat(trained_state))
    assert found["lr"] == [0.01, 0.01]


SAVED_BY_RANKS = """
import os, sys
import torch, torch.distributed as dist
from pathlib import Path
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_optimizer_state_dict)
from durable_snapshots import Net, save_snapshot
from robust_slurm.checkpoint.capture.beside.plain_values import Extra, PlainValue
from robust_slurm.checkpoint.capture.state import Share, State

kind, scratch, rank, world = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=f"file://{scratch}/saving", rank=rank, world_size=world)
torch.manual_seed(5)
plain = model = Net()
if kind == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
else:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh = init_device_mesh("cpu", (world,))
    fully_shard(model, mesh=mesh, ignored_params={model.scale})
large = [p for p in plain.parameters() if p.ndim > 1]
small = [p for p in plain.parameters() if p.ndim < 2]
optimizer = torch.optim.AdamW([{"params": large}, {"params": small}], lr=0.01, foreach=False)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 6)).square().sum().backward()
    optimizer.step()
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
share = Share(tuple(range(world))) if kind == "ddp" else None
objects = {"model": model, "optimizer": optimizer, "rng": None, "extra.schedule": schedule,
           "extra.note": PlainValue(Extra({"note": "hello"}), "note")}
items, kept = State(objects, rank=rank, share=share).capture()
save_snapshot(scratch / f"own-{rank}", [(i.entry, i.tensor) for i in items], kept,
              rank=rank, world=world, needs=share.ranks if share else None)
whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
out = {"model": get_model_state_dict(model, options=whole),
       "optimizer": get_optimizer_state_dict(model, optimizer, options=whole)}
if rank == 0:
    torch.save(out, scratch / "saved.pt")
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # programs/teardown.py says why
"""


@pytest.mark.parametrize(("saved_as", "loaded_as"), [("ddp", "single"), ("fsdp", "fsdp")])
def test_what_real_ranks_capture_loads_without_us(
    torch_forks: TorchForks, tmp_path: Path, tier: Path, saved_as: str, loaded_as: str
) -> None:
    """Saved by 3 ranks through State, loaded by 2 (or 1) with plain DCP."""
    all_end_well(
        [torch_forks.start(SAVED_BY_RANKS, saved_as, str(tmp_path), str(r), "3") for r in range(3)]
    )
    where = store(tier, [tmp_path / f"own-{rank}" for rank in range(3)])
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    world = 2 if loaded_as == "fsdp" else 1
    found = load_without_us(torch_forks, where, tmp_path, loaded_as, world)
    same(found["model"], saved["model"])
    same(flat(found), flat(saved))
    asked = {"extra.schedule": {"last_epoch": -7, "_step_count": -7}, "extra.note": ""}
    torch.distributed.checkpoint.load(asked, checkpoint_id=where, no_dist=True)
    assert asked == {"extra.schedule": {"last_epoch": 0, "_step_count": 1}, "extra.note": "hello"}
