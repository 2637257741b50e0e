"""Divide the state that data-parallel ranks share into a part for each, equally on all ranks."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from ..copying import gpu
from ..copying.portions import Portions, turn
from ..copying.sample import TensorSample, on_host
from ..copying.snapshot import CHUNK, pieces
from ..copying.watch import WHOLE
from ..format.crc import crc32
from ..format.layout import Entry
from ..planning.alike import mark
from .leaves import Item, Leaf

HOLDERS = 64


class Share(NamedTuple):
    """The data-parallel peers of a rank, which hold identical parameters and optimizer state."""

    ranks: tuple[int, ...]
    """In ascending order, with the rank itself."""
    blocks: bool = False
    """True if they hold the same blocks of distributed tensors (HSDP), not only whole tensors."""

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks, evenly spread, that keep a part each of the state that all of them share.

        To restore a rank takes its own snapshot and the holders' snapshots. If all ranks were
        holders, the lists of needed snapshots would grow with the square of the ranks.
        """
        count = min(len(self.ranks), HOLDERS)
        return tuple(self.ranks[i * len(self.ranks) // count] for i in range(count))

    def needs(self, rank: int) -> tuple[int, ...]:
        """The ranks whose snapshots restore this one of the group, ascending."""
        return tuple(sorted({rank, *self.holders}))


class SharedPart(NamedTuple):
    """A block of one of the shared tensors."""

    which: int
    """Index of the tensor in the order given to ``divide``."""
    entry: Entry
    dim: int
    start: int
    length: int
    """Rows ``start`` to ``start + length`` along ``dim``; all of them for a whole tensor."""


def divide(entries: Sequence[Entry], parts: int) -> list[list[SharedPart]]:
    """Cut the shared tensors into as many parts of about equal bytes.

    The bytes of all tensors, one after the other, are cut at equal distances. Each cut is moved to
    the nearest border between rows (along the first dimension longer than 1), so at most
    ``parts - 1`` tensors are cut and each part has at most one block of a tensor.
    """
    total = sum(entry.nbytes for entry in entries)
    cuts = [total * i / parts for i in range(1, parts)]
    shares: list[list[SharedPart]] = [[] for _ in range(parts)]
    at = part = 0
    for index, entry in enumerate(entries):
        dim = next((d for d, size in enumerate(entry.shape) if size > 1), 0)
        rows = entry.shape[dim] if entry.shape else 1
        row = entry.nbytes / rows if rows else 0.0
        start = 0
        while part < parts - 1 and at + entry.nbytes > cuts[part]:
            border = round((cuts[part] - at) / row)
            if border > start:
                shares[part].append(_part(index, entry, dim, start, border - start))
                start = border
            if border >= rows:
                break
            part += 1
        if start < rows or rows == 0:
            shares[part].append(_part(index, entry, dim, start, rows - start))
        at += entry.nbytes
        while part < parts - 1 and at >= cuts[part]:
            part += 1
    return shares


def _part(index: int, entry: Entry, dim: int, start: int, length: int) -> SharedPart:
    shape, offsets = list(entry.shape), list(entry.offsets)
    if shape:
        shape[dim], offsets[dim] = length, offsets[dim] + start
    kind = "piece" if entry.kind == "block" else "shared"
    shared = entry._replace(shape=tuple(shape), offsets=tuple(offsets), kind=kind)
    return SharedPart(index, shared, dim, start, length)


def cut(tensor: torch.Tensor, part: SharedPart) -> torch.Tensor:
    """The part's block of its tensor, as a view."""
    if not tensor.dim() or part.length == tensor.shape[part.dim]:
        return tensor
    return tensor.narrow(part.dim, part.start, part.length)


def checksum(tensors: Iterable[tuple[Entry, torch.Tensor | None]]) -> int:
    """crc32 over names, shapes and bytes of whole tensors, in their order. None: without bytes."""
    crc = 0
    for entry, tensor in tensors:
        crc = crc32(repr((entry.fqn, entry.dtype, entry.shape)).encode(), crc)
        if tensor is None:
            continue
        crc = _crc_of(tensor.detach().to("cpu").contiguous(), crc)
    return crc


def _crc_of(here: torch.Tensor, crc: int) -> int:
    """Continue ``crc`` over a contiguous tensor on the host. torch may be without NumPy."""
    if not here.nbytes:
        return crc
    return crc32((ctypes.c_char * here.nbytes).from_address(here.data_ptr()), crc)


class Fingerprint:
    """A checksum of the tensors that the ranks of a group should hold alike.

    At every step it covers two items of each tensor, which costs next to nothing: ranks that did
    not do the same step differ in nearly all of them. A flipped bit hardly ever shows in these, so
    it also covers a portion of all bytes, another one at each step; at a durable step, all of them.
    """

    def __init__(self, tensors: Sequence[tuple[Entry, torch.Tensor]]) -> None:
        self._tensors = list(tensors)
        self._names = checksum((entry, None) for entry, _ in self._tensors)
        self._sample = TensorSample([tensor for _, tensor in self._tensors])
        self._portions = Portions(self._sample.tensors)

    def take(self, *, whole: bool, step: int | None = None) -> Callable[[], int]:
        """Begin a checksum in the training's thread. Return what ends it, in any thread.

        ``whole``: of all bytes. Tensors on a device are read there, in its current stream.
        ``step``: chooses the portion; None: none."""
        parts: list[torch.Tensor] = []
        here: list[tuple[Entry, torch.Tensor]] = []
        if not whole:
            parts = self._sample.take()
            if step is not None:
                portion = self._portions.take(turn(step, len(self._portions.runs)))
                parts = [*parts, *(each.view(torch.uint8) for each in portion)]
        else:
            here = [each for each in self._tensors if each[1].is_cpu]
            sums = [_sum(tensor) for _, tensor in self._tensors if not tensor.is_cpu]
            parts = [torch.stack(sums)] if sums else []
        devices = gpu.devices_of(parts)
        events = [gpu.event(gpu.cuda.current_stream(device)) for device in devices]
        crc = crc32(b"%d" % checksum(here), self._names)

        def end() -> int:
            for event in events:
                event.synchronize()
            return mark(_crc_of(on_host(parts), crc), whole=whole)

        return end


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the items' bits, in 64 bits, whatever their order in memory. It needs no
    temporary memory over CHUNK; torch makes integers of 64 bits of what it adds up."""
    bits = tensor.view(WHOLE[tensor.itemsize])
    few = [
        part.sum(dtype=torch.int64)
        for piece, _ in pieces(bits, bits)
        for part in torch.split(piece.reshape(-1), CHUNK // 8)
    ]
    return torch.stack(few).sum()


def is_shared(leaf: Leaf, share: Share | None) -> bool:
    """True if the ranks that share hold this tensor alike."""
    if share is None or not leaf.shareable:
        return False
    return share.blocks or leaf.item.entry.kind != "block"


class LeafList(NamedTuple):
    """A list of leaves, taken apart once: a list that changes is another list."""

    leaves: list[Leaf]
    items: list[Item]
    shared: list[Leaf]
    own: list[Item]
    """Items of leaves that are not shared."""

    @classmethod
    def of(cls, leaves: list[Leaf], share: Share | None) -> LeafList:
        return cls(
            leaves,
            [leaf.item for leaf in leaves],
            [leaf for leaf in leaves if is_shared(leaf, share)],
            [leaf.item for leaf in leaves if not is_shared(leaf, share)],
        )
