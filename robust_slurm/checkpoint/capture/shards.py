"""Distributed tensors (DTensor): which block of the whole this rank holds, and how to make one."""

from __future__ import annotations

import sys
from collections.abc import Collection
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch

Block = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and offsets."""


class Shard(NamedTuple):
    """This rank's part of a distributed tensor."""

    local: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    kind: str
    """``whole``: every rank holds all of it; ``block``: a block at ``offsets``; ``private``: what
    only a rank at the same place of the same mesh can use (partial sums, strided shards)."""
    placements: tuple[str, ...]
    mesh: tuple[int, ...]


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor; False as well if torch.distributed.tensor was never imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def shard_of(tensor: Any) -> Shard:
    """Return this rank's shard of a DTensor."""
    local = tensor._local_tensor
    mesh = tuple(tensor.device_mesh.shape)
    names = tuple(_placement_name(p) for p in tensor.placements)
    cuts = [
        (p, size) for p, size in zip(tensor.placements, mesh, strict=True)
        if size > 1 and not p.is_replicate()
    ]  # fmt: skip
    shape = tuple(tensor.shape)
    if not cuts:
        return Shard(local, shape, (0,) * len(shape), "whole", names, mesh)
    partial = any(p.is_partial() for p, _ in cuts)
    block = None if partial else _block(shape, tensor.device_mesh, tensor.placements)
    if block is None or block[0] != tuple(local.shape):
        mine = tuple(local.shape)
        return Shard(local, mine, (0,) * len(mine), "private", names, mesh)
    return Shard(local, shape, block[1], "block", names, mesh)


def holders(tensor: Any) -> tuple[int, ...]:
    """The ranks that hold the same of a DTensor as this one, it included, ascending."""
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    at = tuple(
        slice(None) if place.is_replicate() else own
        for place, own in zip(tensor.placements, here, strict=True)
    )
    return tuple(sorted(mesh.mesh[at].flatten().tolist()))


def block_for(like: Any, names: tuple[str, ...], shape: tuple[int, ...], path: str) -> Block:
    """Shape and offsets of this rank's block of a tensor that is placed so on the mesh of ``like``.

    Raises ValueError where that is not one plain block.
    """
    if any(name.startswith(("P", "SS")) for name in names):
        raise ValueError(f"{path}: placed as {', '.join(names)}, it fits its own mesh only")
    if len(names) != like.device_mesh.ndim:
        dims = like.device_mesh.ndim
        raise ValueError(
            f"{path}: saved from a mesh of {len(names)} dimensions, this one has {dims}"
        )
    found = _block(shape, like.device_mesh, tuple(_placements(like, names, path)))
    assert found is not None  # only strided ones are
    return found


def tile(target: Block, blocks: Collection[Block]) -> list[Block]:
    """Return those of the blocks that have parts of ``target``.

    Raises ValueError unless they hold each of its items just once.
    """
    found = {block: part for block in blocks if (part := common(block, target)) is not None}
    for one, other in combinations(found.values(), 2):
        if common(one, other) is not None:
            raise ValueError("some of its items are there twice")
    here, all_ = sum(prod(part[0]) for part in found.values()), prod(target[0])
    if here != all_:
        raise ValueError(f"of the {all_} items that are this rank's, {here} are there")
    return list(found)


def common(one: Block, other: Block) -> Block | None:
    """Return the block that two have in common; None: nothing."""
    starts = tuple(map(max, one[1], other[1]))
    ends = (
        min(a + n, b + m) for n, a, m, b in zip(one[0], one[1], other[0], other[1], strict=True)
    )
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (shape, starts) if all(size > 0 for size in shape) else None


def _block(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> Block | None:
    """Shape and offsets of this rank's block, None if what it holds is not one block."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    own, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    if prod(own) == 0:  # an empty block lies at the end, which some versions call -1
        whole = zip(offsets, shape, strict=True)
        return tuple(own), tuple(min(max(int(at), 0), size) for at, size in whole)
    if any("Strided" in type(p).__name__ for p in placements) and not _unbroken(
        shape, mesh, placements
    ):
        return None
    return tuple(own), tuple(map(int, offsets))


def _unbroken(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> bool:
    """True if the rows that strided shards leave this rank follow each other.

    They do for FSDP over tensor parallelism where all divides evenly; torch gives only the offset
    of the first row, so the rows are counted off here as torch.chunk would cut them: a strided
    shard cuts the rows into ``split_factor`` pieces first and takes its part of each.
    """
    rows = {dim: torch.arange(size, device="cpu") for dim, size in enumerate(shape)}
    for place, size, here in zip(placements, mesh.shape, mesh.get_coordinate(), strict=True):
        if place.is_replicate():
            continue
        pieces = rows[place.dim].chunk(getattr(place, "split_factor", 1))
        parts = [piece.chunk(size) for piece in pieces]
        rows[place.dim] = torch.cat([p[here] for p in parts if here < len(p)] or [pieces[0][:0]])
    return all(bool((kept.diff() == 1).all()) for kept in rows.values())


def _placement_name(place: Any) -> str:
    """``R``, ``S0``, ``SS0/4`` (strided by 4), ``Psum``."""
    if place.is_replicate():
        return "R"
    if place.is_partial():
        return f"P{place.reduce_op}"
    if "Strided" in type(place).__name__:
        return f"SS{place.dim}/{place.split_factor}"
    return f"S{place.dim}"


def make(
    local: torch.Tensor, like: Any, names: tuple[str, ...], mesh: tuple[int, ...],
    global_shape: tuple[int, ...], path: str,
) -> torch.Tensor:  # fmt: skip
    """A distributed tensor on the mesh of ``like`` whose local part is ``local``.

    Raises ValueError where ``like`` is on another mesh.
    """
    from torch.distributed.tensor import DTensor

    here = tuple(like.device_mesh.shape)
    if here != mesh:
        raise ValueError(f"{path}: saved from a mesh of {mesh}, this one is {here}")
    places = _placements(like, names, path)
    shape = torch.Size(global_shape)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, places, run_check=False, shape=shape, stride=stride
    )


def _placements(like: Any, names: tuple[str, ...], path: str) -> list[Any]:
    """The placements of these names. Raises ValueError."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    known = dict(zip(map(_placement_name, like.placements), like.placements, strict=True))
    places: list[Any] = []
    for name in names:
        if name in known:
            places.append(known[name])
        elif name == "R":
            places.append(Replicate())
        elif name.startswith("P"):
            places.append(Partial(name[1:]))
        elif name[1:].isdigit():
            places.append(Shard(int(name[1:])))
        else:
            raise ValueError(f"{path}: its placement {name} cannot be made here")
    return places
