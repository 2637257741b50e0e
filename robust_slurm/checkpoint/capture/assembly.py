"""Tensors out of snapshots: a rank's own blocks, and shared ones put together from its peers'."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from operator import add, sub
from typing import Any, NamedTuple

import torch

from ..copying.huge_pages import advise_huge
from ..copying.one_thread import use_one_thread
from ..format.dtypes import TORCH, dtype_of, storable
from ..format.layout import Entry, Snapshot
from . import shards
from .leaves import local_part
from .values import TensorRef

MAX_THREADS = 8
PER_THREAD = 8 << 20  # bytes that are worth another thread; each takes about as much at a time


class StateError(ValueError):
    """A snapshot does not fit the objects that it is to be restored into."""


class OpenedSnapshot(NamedTuple):
    """One rank's snapshot, opened."""

    snapshot: Snapshot
    tensors: Mapping[str, torch.Tensor]
    """Entry name → its data: a view of the file, or read from the disk at each request."""


Held = tuple[Entry, Mapping[str, torch.Tensor]]
"""A block, and the tensors of the rank that saved it by their entries' names."""


class WholeTensor(NamedTuple):
    """A tensor in one or more blocks, all of it there."""

    entry: Entry
    """The entry of the first block."""
    shape: tuple[int, ...]
    """Shape of the tensor that is assembled."""
    blocks: tuple[Held, ...]
    """The blocks that form it."""
    origin: tuple[int, ...]
    """Indices of its first element in the tensor that all ranks hold together."""


class Assembly:
    """State that one rank restores: its own snapshot, and the shared blocks of its peers.

    ``resized``: they are of a world of another size, where ranks have other blocks of distributed
    tensors: each is put together from what there is of it.
    """

    def __init__(
        self, sources: Sequence[OpenedSnapshot], rank: int, *, resized: bool = False
    ) -> None:
        self.resized = resized
        self._blocks: dict[str, dict[shards.Block, Held]] = {}
        own = [source for source in sources if source.snapshot.rank == rank]
        if not own:
            raise StateError(f"none of the snapshots given ({len(sources)}) is of rank {rank}")
        self.own = own[0].snapshot
        self._shared: dict[str, dict[tuple[int, ...], Held]] = {}
        self._mine: dict[str, Held] = {}
        for source in sources:
            for entry in source.snapshot.entries:
                if resized and (source is own[0] or entry.kind != "private"):
                    known = self._blocks.setdefault(entry.fqn, {})
                    known.setdefault((entry.shape, entry.offsets), (entry, source.tensors))
                if entry.kind in ("shared", "piece"):
                    self._shared.setdefault(entry.fqn, {})[entry.offsets] = (entry, source.tensors)
                elif source is own[0]:
                    self._mine[entry.fqn] = (entry, source.tensors)
        self._peers = sorted({source.snapshot.rank for source in sources})

    def adopt(self, key: str, source: OpenedSnapshot) -> None:
        """Take another rank's own tensors under this key for this rank's."""
        for entry in source.snapshot.entries:
            if entry.kind not in ("shared", "piece") and entry.fqn.startswith(f"{key}."):
                self._mine[entry.fqn] = (entry, source.tensors)

    def fitted(self, section: object, encoded: Any) -> Any:
        """Return what belongs to a section here of the state that was saved for it: all of it."""
        return encoded

    @property
    def together(self) -> frozenset[str]:
        """Names of what is put together from the peers' parts."""
        return frozenset(self._shared.keys() - self._mine.keys())

    def find(self, fqn: str) -> WholeTensor:
        """Return the tensor held under a name. StateError if the snapshots lack a part of it."""
        mine = self._mine.get(fqn)
        if mine is not None:
            return WholeTensor(mine[0], mine[0].shape, (mine,), mine[0].offsets)
        blocks = self._shared.get(fqn)
        if not blocks:
            raise StateError(f"{fqn}: not in the snapshots of ranks {self._peers}")
        parts = [blocks[offsets] for offsets in sorted(blocks)]
        first = parts[0][0]
        shape, origin = first.global_shape, (0,) * len(first.offsets)
        if first.kind == "piece":  # of this rank's block: it ends where the last piece does
            origin, last = first.offsets, parts[-1][0]
            ends = map(add, last.offsets, last.shape)
            shape = tuple(map(sub, ends, origin))
        at = 0
        for part, _ in parts:
            # Only dimensions of size 1 come before the one that is cut: it is one run of items.
            starts = map(sub, part.offsets, origin)
            start = sum(o * prod(shape[d + 1 :]) for d, o in enumerate(starts))
            if part.global_shape != first.global_shape or start != at:
                break
            at += prod(part.shape)
        if at != prod(shape):
            raise StateError(
                f"{fqn}: of its {prod(shape)} items the snapshots of ranks {self._peers} hold "
                f"only the first {at} without a gap"
            )
        return WholeTensor(first, shape, tuple(parts), origin)

    def _cut_anew(self, ref: TensorRef, like: Any) -> WholeTensor:
        """Return this rank's block, on the mesh of ``like``, of a distributed tensor that was saved
        on another one. StateError if the snapshots do not hold each of its items just once."""
        known = self._blocks.get(ref.fqn)
        if not known or ref.shape:
            why = "only a rank of its own mesh can use it" if known else "not in the snapshots"
            raise StateError(f"{ref.fqn}: {why}")
        entry = next(iter(known.values()))[0]
        extra = entry.shape[-1:] if ref.dtype and dtype_of(ref.dtype).is_complex else ()
        shape = entry.global_shape[: len(entry.shape) - len(extra)]
        try:
            own, at = shards.block_for(like, ref.placements, shape, ref.fqn)
        except ValueError as err:
            raise StateError(str(err)) from None
        try:
            target = (*own, *extra), (*at, *(0 for _ in extra))
            blocks = [known[block] for block in shards.tile(target, known)]
        except ValueError as err:
            raise StateError(f"{ref.fqn}: {err} (snapshots of ranks {self._peers})") from None
        kinds = {(found.global_shape, found.dtype) for found, _ in (*blocks, (entry, None))}
        if len(kinds) > 1:
            raise StateError(
                f"{ref.fqn}: of one shape or type in a snapshot, of another in another"
            )
        return WholeTensor(entry, target[0], tuple(blocks), target[1])

    def _check_rows(self, ref: TensorRef, like: torch.Tensor | None) -> None:
        """Raise StateError for a plain tensor of items that belongs to a tensor cut anew: it may be
        of the rows that a rank had, which are not the rows that it has now."""
        cut = self.resized and not ref.placements and like is not None and shards.is_dtensor(like)
        if cut and shards.shard_of(like).mesh[1:] == () and self.find(ref.fqn).shape:
            raise StateError(f"{ref.fqn}: a plain tensor of a distributed one, for one mesh only")

    def into(self, live: torch.Tensor, ref: TensorRef, like: torch.Tensor | None = None) -> Fill:
        """Check that the saved tensor fits a live one. Return the copy into it. ``like``: as for
        ``fresh``. Raises StateError that names the tensor."""
        whole = self._for_live(live, ref, like)
        target = local_part(live).detach().as_subclass(torch.Tensor)
        saved = dtype_of(ref.dtype) if ref.dtype else TORCH[whole.entry.dtype]
        if target.dtype != saved:
            raise StateError(f"{ref.fqn}: saved as {saved}, it is {target.dtype} here")
        stored = storable(target)
        if tuple(stored.shape) != whole.shape:
            raise StateError(
                f"{ref.fqn}: saved with shape {list(whole.shape)}, it has {list(stored.shape)} here"
            )
        return Fill(stored, whole)

    def _for_live(
        self, live: torch.Tensor, ref: TensorRef, like: torch.Tensor | None
    ) -> WholeTensor:
        """Return what a live tensor is filled with. Raises StateError."""
        self._check_rows(ref, like)
        local = local_part(live)
        anew = self.resized and local is not live and bool(ref.placements)
        whole = self._cut_anew(ref, live) if anew else self.find(ref.fqn)
        if anew:
            _check_placed(live, ref, whole.entry)
        elif local is not live:
            _check_shard(live, ref, whole.entry)
        elif ref.placements:
            raise StateError(f"{ref.fqn}: saved as a distributed tensor, it is none here")
        return whole

    def _for_new(self, ref: TensorRef, like: torch.Tensor | None) -> tuple[WholeTensor, bool]:
        """Return what a new tensor is filled with, and True if its strides are those that were
        saved. Raises StateError."""
        self._check_rows(ref, like)
        cut = like if like is not None and local_part(like) is not like else None
        anew = self.resized and bool(ref.placements) and cut is not None
        return (self._cut_anew(ref, cut) if anew else self.find(ref.fqn)), not anew

    def whole(self, fqn: str) -> torch.Tensor:
        """Return the data held under a name, as they are stored. Raises StateError."""
        found = self.find(fqn)
        data = torch.empty(found.shape, dtype=TORCH[found.entry.dtype], device="cpu")
        Fill(data, found).run()
        return data

    def fresh(self, ref: TensorRef, like: torch.Tensor | None = None) -> torch.Tensor:
        """A new tensor with the saved data.

        ``like``: what it belongs to (a parameter), for its device and mesh. Raises StateError.
        """
        tensor, fill = self.later(ref, like)
        fill.run()
        return tensor

    def later(self, ref: TensorRef, like: torch.Tensor | None = None) -> tuple[torch.Tensor, Fill]:
        """Return a new tensor, and the copy of the saved data into it. Raises StateError."""
        whole, same_strides = self._for_new(ref, like)
        dtype = dtype_of(ref.dtype) if ref.dtype else TORCH[whole.entry.dtype]
        shape = whole.shape[:-1] if ref.dtype and dtype.is_complex else whole.shape
        device = _device(ref, like)
        if len(ref.stride) == len(shape) > 0 and same_strides:
            tensor = torch.empty_strided(shape, ref.stride, dtype=dtype, device=device)
        else:
            tensor = torch.empty(shape, dtype=dtype, device=device)
        advise_huge(tensor)
        fill = Fill(storable(tensor), whole)
        return self._wrap(tensor, ref, whole, like), fill

    def _wrap(
        self, tensor: torch.Tensor, ref: TensorRef, whole: WholeTensor, like: torch.Tensor | None
    ) -> torch.Tensor:
        """The distributed tensor that ``tensor`` is the local part of, if it is one."""
        if not ref.placements:
            return tensor
        if like is None or local_part(like) is like:
            raise StateError(
                f"{ref.fqn}: a distributed tensor; it can be restored only where the object holds "
                f"it already, or as the state of a distributed parameter"
            )
        extra = len(whole.shape) - tensor.dim()
        shape = ref.shape or whole.entry.global_shape[: len(whole.shape) - extra]
        mesh = shards.shard_of(like).mesh if self.resized else ref.mesh
        try:
            return shards.make(tensor, like, ref.placements, mesh, shape, ref.fqn)
        except ValueError as err:
            raise StateError(str(err)) from None


class Fill(NamedTuple):
    """A copy that is known to fit."""

    target: torch.Tensor
    whole: WholeTensor

    def run(self) -> None:
        """Copy. Raises StateError where memory cannot be written (it overlaps itself)."""
        for entry, tensors in self.whole.blocks:
            block = tensors[entry.name]
            into = self.target
            for dim, size in enumerate(self.whole.shape):
                start, begin = self.whole.origin[dim], entry.offsets[dim]
                first, end = max(start, begin), min(start + size, begin + entry.shape[dim])
                if end - first != size:
                    into = into.narrow(dim, first - start, end - first)
                if end - first != entry.shape[dim]:
                    block = block.narrow(dim, first - begin, end - first)
            into, block = _without_repeats(into, block, entry.fqn)
            try:
                into.copy_(block)
            except RuntimeError as err:
                raise StateError(f"{entry.fqn}: cannot be written: {err}") from err


def _without_repeats(
    into: torch.Tensor, block: torch.Tensor, fqn: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, without the items of ``into`` that share memory because it was expanded.

    Raises StateError where the saved ones differ.
    """
    for dim, stride in enumerate(into.stride()):
        if stride == 0 and into.shape[dim] > 1:
            first = block.narrow(dim, 0, 1)
            both = (each.contiguous().view(torch.uint8) for each in (block, first.expand_as(block)))
            if not torch.equal(*both):
                raise StateError(f"{fqn}: saved with other items where it repeats one here")
            into, block = into.narrow(dim, 0, 1), first
    return into, block


Step = Fill | Callable[[], object]
"""One part of restoring."""


def run_all(fills: Sequence[Fill]) -> None:
    """Copy everything, in several threads if it is much. Raises StateError."""
    # Neighbours stay together: threads should not meet at the first write of one page.
    units: list[list[Fill]] = []
    left = 0
    for fill in fills:
        if left <= 0:
            units.append([])
            left = PER_THREAD
        units[-1].append(fill)
        left -= fill.target.nbytes
    # Largest first, so that all threads end at about the same time.
    units.sort(key=lambda unit: -sum(fill.target.nbytes for fill in unit))
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)), len(units))
    if threads < 2:
        for unit in units:
            _run(unit)
        return
    with ThreadPoolExecutor(threads, "restore", use_one_thread) as pool:
        for _ in pool.map(_run, units):
            pass


def _run(fills: Sequence[Fill]) -> None:
    for fill in fills:
        fill.run()


def _check_placed(live: torch.Tensor, ref: TensorRef, entry: Entry) -> None:
    """Raise StateError unless a live tensor is cut as the saved one, on whatever mesh."""
    shard = shards.shard_of(live)
    saved, dims = entry.global_shape[: len(shard.global_shape)], len(ref.mesh)
    if (shard.placements, len(shard.mesh)) != (ref.placements, dims) or shard.kind == "private":
        raise StateError(
            f"{ref.fqn}: saved as {_placed(ref.placements, ref.mesh)}, it is "
            f"{_placed(shard.placements, shard.mesh)} here"
        )
    if shard.global_shape != saved:
        raise StateError(
            f"{ref.fqn}: saved with shape {list(saved)}, it has {list(shard.global_shape)} here"
        )


def _check_shard(live: torch.Tensor, ref: TensorRef, entry: Entry) -> None:
    shard = shards.shard_of(live)
    if (shard.placements, shard.mesh) != (ref.placements, ref.mesh):
        raise StateError(
            f"{ref.fqn}: saved as {_placed(ref.placements, ref.mesh)}, it is "
            f"{_placed(shard.placements, shard.mesh)} here"
        )
    dims = len(shard.offsets)
    if shard.kind == "block" and (
        shard.offsets != entry.offsets[:dims] or shard.global_shape != entry.global_shape[:dims]
    ):
        raise StateError(
            f"{ref.fqn}: saved as the block at {list(entry.offsets)} of "
            f"{list(entry.global_shape)}, this rank holds the one at {list(shard.offsets)} of "
            f"{list(shard.global_shape)}"
        )


def _placed(placements: tuple[str, ...], mesh: tuple[int, ...]) -> str:
    if not placements:
        return "a whole tensor"
    return f"{', '.join(placements)} on a mesh of {'x'.join(map(str, mesh))}"


def _device(ref: TensorRef, like: torch.Tensor | None) -> torch.device:
    """Return the device for a new tensor: the CPU, or the accelerator that this process uses."""
    if not ref.device:
        return torch.device("cpu")
    if like is not None:
        return like.device
    return torch.empty(0, device=ref.device).device
