"""State that ranks of any other number, or on any other mesh, saved: each tensor is cut anew.

A tensor is restored as it is placed here, whatever its placement was: its blocks are read from all
ranks that saved some of it. It keeps the type that it was saved with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch

from ..format.dtypes import dtype_of
from ..format.layout import Entry, Snapshot
from . import shards
from .assembly import Assembly, Held, OpenedSnapshot, StateError, WholeTensor
from .leaves import local_part
from .module_state import ModuleState
from .optimizer_state import OptimizerState
from .values import Encoded, TensorRef

ELSEWHERE = "Go on with as many ranks as saved it, on the same mesh"


class AnyWorld(Assembly):
    """The state that a world saved, for one rank of any other world."""

    def __init__(
        self,
        own: Snapshot,
        blocks: Callable[[str], Sequence[Held]],
        *,
        cut: bool,
        stages: bool,
        differing: Collection[str] = (),
    ) -> None:
        """``own``: of the lowest rank, with the values of all. ``blocks``: returns all blocks of a
        tensor. ``cut``: some tensors are in blocks. ``stages``: not all ranks have saved tensors of
        the same names, so a rank takes its own of them. ``differing``: names of tensors of which
        the ranks have saved other contents; those of the lowest are taken."""
        super().__init__([OpenedSnapshot(own, {})], own.rank, resized=True)
        self._held = blocks
        self._is_cut, self.stages, self._differing = cut, stages, frozenset(differing)

    def find(self, fqn: str) -> WholeTensor:
        """Return the tensor, of all ranks together. StateError if it was not saved."""
        shape = self._first(fqn).global_shape
        return self._part(fqn, (shape, (0,) * len(shape)))

    def fitted(self, section: object, encoded: Encoded) -> Encoded:
        """Return of the state of a model or optimizer that ranks saved in parts, such as the stages
        of a pipeline, what belongs to this section."""
        if self.stages and isinstance(section, ModuleState):
            names = section.live_names()
            return {"d": {name: v for name, v in encoded["d"].items() if name in names}}
        if self.stages and isinstance(section, OptimizerState):
            return _own_groups(section, encoded)
        return encoded

    def _first(self, fqn: str) -> Entry:
        held = self._held(fqn)
        if not held:
            raise StateError(f"{fqn}: not in the checkpoint")
        return held[0][0]

    def _part(self, fqn: str, target: shards.Block) -> WholeTensor:
        held = self._held(fqn)
        parts: dict[shards.Block, Held] = {}
        there = 0
        for entry, tensors in held:
            block = entry.shape, entry.offsets
            common = shards.common(block, target)
            if common is not None and block not in parts:
                parts[block] = entry, tensors
                there += prod(common[0])
        if there != prod(target[0]):
            raise StateError(
                f"{fqn}: of the {prod(target[0])} items that are this rank's, {there} are there"
            )
        return WholeTensor(held[0][0], target[0], tuple(parts.values()), target[1])

    def _shape(self, ref: TensorRef) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the whole tensor, and what its data have beyond that (the real and
        imaginary part of a complex type)."""
        if ref.shape:  # partial sums, strided shards
            raise StateError(f"{ref.fqn}: only a rank of its own mesh can use it. {ELSEWHERE}")
        shape = self._first(ref.fqn).global_shape
        pairs = bool(ref.dtype) and dtype_of(ref.dtype).is_complex
        return (shape[:-1], shape[-1:]) if pairs else (shape, ())

    def _for_live(
        self, live: torch.Tensor, ref: TensorRef, like: torch.Tensor | None
    ) -> WholeTensor:
        shape, more = self._shape(ref)
        self._check_own(ref, shape, like)
        if tuple(live.shape) != shape:
            raise StateError(
                f"{ref.fqn}: saved with shape {list(shape)}, it has {list(live.shape)} here"
            )
        return self._part(ref.fqn, _with(_block_of(live, ref.fqn), more))

    def _for_new(self, ref: TensorRef, like: torch.Tensor | None) -> tuple[WholeTensor, bool]:
        shape, more = self._shape(ref)
        self._check_own(ref, shape, like)
        names = self._placements(ref, shape, like)
        block: shards.Block = (shape, (0,) * len(shape))
        if names and shape == tuple(like.shape):  # type: ignore[union-attr]
            block = _block_of(like, ref.fqn)
        elif names:
            try:
                block = shards.block_for(like, names, shape, ref.fqn)
            except ValueError as err:
                raise StateError(f"{err}. {ELSEWHERE}") from None
        return self._part(ref.fqn, _with(block, more)), not names and not ref.placements

    def _wrap(
        self, tensor: torch.Tensor, ref: TensorRef, whole: WholeTensor, like: torch.Tensor | None
    ) -> torch.Tensor:
        shape, _ = self._shape(ref)
        names = self._placements(ref, shape, like)
        if not names:
            return tensor
        mesh = shards.shard_of(like).mesh
        try:
            return shards.make(tensor, like, names, mesh, shape, ref.fqn)
        except ValueError as err:
            raise StateError(f"{err}. {ELSEWHERE}") from None

    def _placements(
        self, ref: TensorRef, shape: tuple[int, ...], like: torch.Tensor | None
    ) -> tuple[str, ...]:
        """Return how a new tensor that belongs to ``like`` is placed here; (): it is whole."""
        if like is None:
            if ref.placements:
                raise StateError(
                    f"{ref.fqn}: a distributed tensor; it can be restored only where the object "
                    "holds it already, or as the state of a distributed parameter"
                )
            return ()
        if local_part(like) is like or not (shape or ref.placements):
            return ()
        here = shards.shard_of(like)
        if shape == tuple(like.shape):
            return here.placements
        if len(ref.placements) == len(here.placements):
            return ref.placements
        raise StateError(
            f"{ref.fqn}: of shape {list(shape)}, its parameter of {list(like.shape)} is "
            f"distributed here, and nothing tells how to cut it. {ELSEWHERE}"
        )

    def _check_own(self, ref: TensorRef, shape: tuple[int, ...], like: torch.Tensor | None) -> None:
        """Raise StateError for a plain tensor of a distributed parameter: it may be of the rows
        that a rank had, which are not the rows of any rank now."""
        if like is None or ref.placements or not shape:
            return
        if self._is_cut and (shape != tuple(like.shape) or ref.fqn in self._differing):
            raise StateError(
                f"{ref.fqn}: a plain tensor of a distributed parameter, for one mesh only. "
                f"{ELSEWHERE}"
            )


def _block_of(tensor: Any, fqn: str) -> shards.Block:
    """Return the shape and place of what this rank holds of a tensor."""
    if local_part(tensor) is tensor:
        return tuple(tensor.shape), (0,) * tensor.dim()
    shard = shards.shard_of(tensor)
    if shard.kind == "private":
        placed = ", ".join(shard.placements)
        raise StateError(f"{fqn}: placed as {placed}, it fits its own mesh only. {ELSEWHERE}")
    return tuple(shard.local.shape), shard.offsets


def _with(block: shards.Block, more: tuple[int, ...]) -> shards.Block:
    return (*block[0], *more), (*block[1], *(0 for _ in more))


def _own_groups(section: OptimizerState, encoded: Encoded) -> Encoded:
    """Return the optimizer's state with just the parameters of the section, in its groups."""
    body = encoded["d"]
    groups = [dict(group["d"]) for group in body["param_groups"]]
    at = {name: number for number, group in enumerate(groups) for name in group["params"]}
    own, chosen = set[Any](), []
    for number, names in enumerate(section.group_names()):
        own |= set(names)
        group = groups[min(at.get(names[0], number) if names else number, len(groups) - 1)]
        params = [name for name in group["params"] if name in names]
        chosen.append({"d": {**group, "params": params}})
    state = {name: part for name, part in body["state"]["d"].items() if name in own}
    return {"d": {**body, "state": {"d": state}, "param_groups": chosen}}


def joined(one: Encoded, other: Encoded) -> Encoded:
    """Return the states of models or optimizers of two ranks as one. Where both have the same, it
    is that of the first."""
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [joined(*pair) for pair in zip(one, other, strict=True)]
    if not all(isinstance(each, dict) and isinstance(each.get("d"), dict) for each in (one, other)):
        return one
    a, b = one["d"], other["d"]
    if {"state", "param_groups"} <= a.keys() & b.keys():
        return {"d": {**a, **_joined_optimizers(a, b)}}
    both = {k: joined(a[k], b[k]) if k in a and k in b else a.get(k, b.get(k)) for k in {**a, **b}}
    return {"d": both}


def _joined_optimizers(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    groups = [dict(group["d"]) for group in one["param_groups"]]
    known = {name for group in groups for name in group["params"]}
    theirs = {name for group in other["param_groups"] for name in group["d"]["params"]}
    if not all(type(name) is str for name in known | theirs):
        raise StateError(
            f"an optimizer has parameters that no model has, and others on other ranks. {ELSEWHERE}"
        )
    for number, each in enumerate(other["param_groups"]):
        group = dict(each["d"])
        new = [name for name in group["params"] if name not in known]
        if not new:
            continue
        same = groups[number] if number < len(groups) else None
        if same is not None and {**same, "params": 0} == {**group, "params": 0}:
            same["params"] = [*same["params"], *new]
        else:
            groups.append({**group, "params": new})
    state = joined(one["state"], other["state"])
    return {"state": state, "param_groups": [{"d": group} for group in groups]}
