"""One rank of a world that goes on with what a world of another size saved, and saves its own.

Arguments: directory, ``fsdp``, ``hsdp`` or ``both``, number of the world. For the test of the same
name as ``test_checkpoint_other_mesh.py``.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_files import source, write
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from robust_slurm.checkpoint.capture.state import State, StateError
from robust_slurm.checkpoint.capture.taken_over import Taken
from robust_slurm.checkpoint.training.mesh import check_mesh, find_cut, find_share
from robust_slurm.resizing.change import fewer, more, owners

DIRECTORY, KIND, NUMBER = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FULL = [(0,), (1,), (2,), (3,)]
BEFORE = {("fsdp", 1): 0, ("hsdp", 2): 0, ("fsdp", 3): 1, ("hsdp", 4): 2}
LOST, REPLICAS = 1, [(0, 2), (1, 3)]


def make(kind: str) -> tuple[nn.Module, Any]:
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp",))
    else:
        names = ("dp_replicate", "dp_shard")
        mesh = init_device_mesh("cpu", (SIZE // 2, 2), mesh_dim_names=names)
    torch.manual_seed(NUMBER)  # what is not restored is seen
    model = nn.Sequential(nn.Linear(12, 9), nn.Linear(9, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))  # tells the device to some
    model.register_buffer("own", torch.full((2,), float(RANK % 2)))
    fully_shard(model[0], mesh=mesh, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, (mesh, optimizer)


def full(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """All parameters and optimizer state, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        found |= {f"{name}.{key}": t for key, t in optimizer.state[parameter].items()}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in found.items()
    }


def change_of(kind: str) -> Any:
    groups = [range(4)] if kind == "fsdp" else REPLICAS
    smaller = fewer(FULL, [LOST], groups, 1)
    if SIZE < 4:
        return smaller
    come = set(range(4)) - set(smaller.places)
    return more(smaller.ranks, FULL, list(smaller.places), come)


def refused(kind: str, model: nn.Module, optimizer: Any) -> None:
    """See that no other world is promised to what is cut otherwise."""
    scale = nn.Parameter(torch.ones(()))
    other = torch.optim.SGD([scale])
    blocks = nn.ParameterList(model.parameters())
    of_two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = [nn.Linear(4, 4) for _ in range(2)]
    fully_shard(layers[0], mesh=of_two["dp"])
    fully_shard(layers[1], mesh=init_device_mesh("cpu", (SIZE,), mesh_dim_names=("dp_cp",)))
    for models, optimizers, why in [
        ([model], [optimizer, other], "only some of its trained parameters"),
        ([nn.Sequential(model, nn.Linear(1, 1))], [optimizer], "only some"),
        ([blocks], [], "the model is none of fully_shard"),
        ([layers[0]], [], "not on one mesh of all ranks"),
        ([layers[1]], [], "a mesh of dp_cp"),
    ]:
        assert why in find_cut(models, [], optimizers, SIZE).why, (why, kind)
    assert find_cut([model], [], [optimizer], SIZE + 1).why
    assert find_cut([nn.Linear(1, 1)], [], [other], SIZE) == ("", (), 0)


def rows_of_its_own(kind: str, model: nn.Module) -> None:
    """See that optimizer state of the rows that a rank had is for these rows only."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for p in model.parameters():
        assert isinstance(p, DTensor)
        sgd.state[p] = {"rows": p.to_local().detach().clone(), "step": torch.tensor(1.0)}
    state = State({"model": model, "optimizer": sgd}, rank=RANK)
    path = write(DIRECTORY / f"rows-{kind}-{RANK}", *state.capture(), rank=RANK, world=SIZE)
    for _ in range(2):  # where there is such state already, and where there is none
        try:
            state.restore([source(path)], Taken(RANK, ()))
            assert kind == "hsdp", "rows of another rank"
        except StateError as error:
            assert kind == "fsdp" and "rows: a plain tensor" in str(error), error
        sgd.state.clear()


def run(kind: str) -> None:
    model, (mesh, optimizer) = make(kind)
    share = find_share([model], check_mesh(mesh, SIZE), RANK)
    cut = find_cut([model], [], [optimizer], SIZE)
    assert cut == (("", (1, 3, 9, 12), 0) if kind == "fsdp" else ("", (), 2)), cut
    if not NUMBER:
        refused(kind, model, optimizer)
        rows_of_its_own(kind, model)
    state = State({"model": model, "optimizer": optimizer, "rng": None}, rank=RANK, share=share)
    if NUMBER:
        before, change = BEFORE[kind, NUMBER], change_of(kind)
        own = owners(change.origin, change.old, SIZE, 4, cut.lengths)[RANK]
        first = source(DIRECTORY / f"{kind}-{before}-{own[0]}")
        wanted = dict.fromkeys((*own, *first.snapshot.needs))
        sources = [source(DIRECTORY / f"{kind}-{before}-{rank}") for rank in wanted]
        taken = Taken(own[0], (), anew=RANK in change.anew)
        (DIRECTORY / f"{kind}-{NUMBER}-{RANK}.json").write_text(json.dumps(sorted(wanted)))
        if kind == "fsdp" and SIZE == 3:
            try:
                state.restore(sources[:1], taken)
                raise AssertionError("restored from one rank's blocks")
            except StateError as error:
                assert "items that are this rank's" in str(error), error
        state.restore(sources, taken)
        there = torch.load(DIRECTORY / f"{kind}-{before}.pt")
        here = full(model, optimizer)
        assert here.keys() == there.keys()
        for name, tensor in here.items():
            assert tensor.dtype == there[name].dtype and tensor.equal(there[name]), name
        assert model.own[0] == change.origin[RANK] % 2 or kind == "fsdp"  # of its origin
        for parameter in model.parameters():
            for tensor in optimizer.state[parameter].values():
                if isinstance(tensor, DTensor):
                    assert tensor.device_mesh == parameter.device_mesh
                    assert tensor.placements == parameter.placements
    torch.manual_seed(100 + RANK)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
    items, values = state.capture()
    path = DIRECTORY / f"{kind}-{NUMBER}-{RANK}"
    needs = share.needs(RANK) if share is not None else (RANK,)
    write(path, items, values, rank=RANK, world=SIZE, needs=needs)
    whole = full(model, optimizer)
    if RANK == 0:
        torch.save(whole, DIRECTORY / f"{kind}-{NUMBER}.pt")


dist.init_process_group("gloo")
torch.set_num_threads(1)
for each in ("fsdp", "hsdp") if KIND == "both" else (KIND,):
    run(each)
dist.barrier()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # programs/teardown.py says why
