"""The ranks: rank and world, the mesh, and groups that hold the same parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from robust_slurm.resizing.dimensions import DATA, SAME_TENSORS
from robust_slurm.resizing.shares import MOST_LENGTHS
from robust_slurm.text import counted

from ..capture import shards
from ..capture.state import Share


class RankIds(NamedTuple):
    rank: int
    size: int
    local: int
    """Number of this rank on its node."""
    local_size: int


def is_distributed() -> bool:
    return bool(dist.is_available() and dist.is_initialized())


def world() -> RankIds:
    """Read rank and world from torch.distributed, else the environment; without both, one rank."""
    rank, size = _env("RANK", "SLURM_PROCID"), _env("WORLD_SIZE", "SLURM_NTASKS")
    if is_distributed():
        rank, size = dist.get_rank(), dist.get_world_size()
    if rank is None or size is None or not 0 <= rank < size:
        rank, size = 0, 1
    local = _env("LOCAL_RANK", "SLURM_LOCALID")
    return RankIds(rank, size, local or 0, _env("LOCAL_WORLD_SIZE") or 1)


def check_mesh(mesh: Any, size: int) -> dict[str, int]:
    """A mesh as name → size. Raises TypeError, ValueError saying what to pass."""
    if mesh is None:
        return {}
    if isinstance(mesh, Mapping):
        sizes = dict(mesh)
    else:
        names, ranks = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "mesh", None)
        if not isinstance(ranks, torch.Tensor):
            raise TypeError(
                f"mesh: a dict of name to size or a torch DeviceMesh, not {type(mesh).__name__}"
            )
        if not names:
            raise ValueError("mesh: give its dimensions names (mesh_dim_names of init_device_mesh)")
        if ranks.flatten().tolist() != list(range(size)):
            raise ValueError(
                f"mesh: pass the root mesh, with ranks 0 to {size - 1} in order; this one has "
                f"{ranks.tolist()}"
            )
        sizes = dict(zip(names, ranks.shape, strict=True))
    for name, count in sizes.items():
        if not isinstance(name, str) or isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"mesh: names to sizes, as in {{'dp': 2, 'pp': 4}}, not {sizes!r}")
        if count < 1:
            raise ValueError(f"mesh: {name} has size {count}")
    if sizes and prod(sizes.values()) != size:
        raise ValueError(
            f"mesh: {sizes} has {counted(prod(sizes.values()), 'rank')}, the world has {size}: "
            "name every dimension, so that the product is the world size"
        )
    return sizes


def peers(mesh: Mapping[str, int], rank: int, name: str) -> tuple[int, ...]:
    """Ranks that differ from ``rank`` only along dimension ``name``, sorted, it included."""
    names = list(mesh)
    stride = prod(mesh[n] for n in names[names.index(name) + 1 :])
    first = rank - (rank // stride) % mesh[name] * stride
    return tuple(first + i * stride for i in range(mesh[name]))


def find_share(models: Iterable[Any], mesh: Mapping[str, int], rank: int) -> Share | None:
    """The ranks that hold the same plain tensors as this one, as far as can be told."""
    if not is_distributed():
        return None  # it could not be checked
    models = list(models)
    groups = {
        tuple(sorted(dist.get_process_group_ranks(model.process_group)))
        for model in models
        if isinstance(model, torch.nn.parallel.DistributedDataParallel)
    }
    name = next((n for n in SAME_TENSORS if n in mesh), None)
    named = peers(mesh, rank, name) if name else (rank,)
    parameters = [p for model in models for p in model.parameters()]
    blocks = not groups and any(shards.is_dtensor(p) for p in parameters)
    if len(groups) == 1:
        found = groups.pop()
    elif groups:
        return None
    elif blocks:  # the ranks that hold the same part of every parameter
        alike = {shards.holders(p) if shards.is_dtensor(p) else named for p in parameters}
        found = tuple(sorted(set.intersection(*map(set, alike))))
    else:
        found = named
    return Share(found, blocks) if len(found) > 1 else None


class Cut(NamedTuple):
    """Parameters in blocks, as a world of another size has to know them."""

    why: str
    """Reason why no world of another size could go on with them; empty: it could."""
    lengths: tuple[int, ...] = ()
    shards: int = 0
    """See ``EnrolledEvent`` for both."""


def find_cut(
    models: Sequence[Any], others: Iterable[Any], optimizers: Iterable[Any], size: int
) -> Cut:
    """Return how ``fully_shard`` has cut the parameters of all ranks. ``others``: of ``extra``."""
    found: list[Any] = [p for each in (*models, *others) for p in _parameters(each)]
    groups = [group for each in optimizers for group in getattr(each, "param_groups", ())]
    own = (p for group in groups for p in group.get("params", ()))
    trained = [p for p in (*found, *own) if p.requires_grad]
    blocks = [p for p in found if shards.is_dtensor(p)]
    if not blocks and not any(map(shards.is_dtensor, trained)):
        return Cut("")
    if not all(map(shards.is_dtensor, trained)):
        return Cut("only some of its trained parameters are distributed tensors")
    cut = [each for each in models if any(map(shards.is_dtensor, _parameters(each)))]
    if not cut or not all(hasattr(each, "set_requires_gradient_sync") for each in cut):
        return Cut("its parameters are distributed tensors, but the model is none of fully_shard")
    meshes = {id(p.device_mesh): p.device_mesh for p in blocks}.values()
    kinds = {(tuple(mesh.mesh.shape), mesh.mesh_dim_names) for mesh in meshes}
    if len(kinds) != 1 or any(m.mesh.flatten().tolist() != list(range(size)) for m in meshes):
        return Cut("its parameters are not on one mesh of all ranks")
    ((shape, names),) = kinds
    if not DATA.issuperset(names or ()):
        return Cut(f"its parameters are on a mesh of {', '.join(names)}")
    places = {tuple(p.is_replicate() for p in each.placements) for each in blocks}
    if places - {(False,), (True, False)} or not all(map(_in_rows, blocks)):
        return Cut("its parameters are cut otherwise than fully_shard cuts them")
    if len(shape) > 1:
        return Cut("", shards=shape[-1])
    lengths = sorted({p.shape[p.placements[0].dim] for p in blocks if p.numel()})
    if len(lengths) > MOST_LENGTHS:
        return Cut(f"its parameters are cut along {len(lengths)} lengths")
    return Cut("", tuple(lengths))


def _parameters(found: Any) -> Iterable[torch.Tensor]:
    return found.parameters() if isinstance(found, torch.nn.Module) else ()


def _in_rows(parameter: Any) -> bool:
    """True if its last placement is a plain shard."""
    last = parameter.placements[-1]
    return bool(last.is_shard()) and "Strided" not in type(last).__name__


def gather(values: Sequence[int]) -> list[list[int]]:
    """These integers of every rank, by rank. Every rank calls it with as many."""
    if not is_distributed():
        return [list(values)]
    # NCCL moves nothing but device memory.
    on_gpu = "nccl" in dist.get_backend()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    own = torch.tensor(values, dtype=torch.int64, device=device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    return [part.tolist() for part in parts]


def gather_objects(value: Any) -> list[Any]:
    """Return the values of every rank, by rank. Every rank calls it."""
    if not is_distributed():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def default_store() -> Any:
    """Return the store of torch.distributed; None if there is none, as over MPI."""
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None


def _env(*names: str) -> int | None:
    for name in names:
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return None
