"""Which part of what data-parallel ranks share each of them keeps: the same answer on all."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from .crc import crc32
from .layout import Entry


class Share(NamedTuple):
    """The data-parallel peers of a rank, which hold identical parameters and optimizer state."""

    ranks: tuple[int, ...]
    """In ascending order, with the rank itself."""


class Part(NamedTuple):
    """A block of one of the shared tensors."""

    which: int
    """Which one, in the order given to ``divide``."""
    entry: Entry
    dim: int
    start: int
    length: int
    """Rows ``start`` to ``start + length`` along ``dim``; all of them for a whole tensor."""


def divide(entries: Sequence[Entry], parts: int) -> list[list[Part]]:
    """Cut the shared tensors into as many parts of about equal bytes.

    All bytes in a row are cut at equal distances, each cut moved to the nearest border between
    rows (along the first dimension longer than 1), so at most ``parts - 1`` tensors are cut and
    each part has at most one block of a tensor.
    """
    total = sum(entry.nbytes for entry in entries)
    cuts = [total * i / parts for i in range(1, parts)]
    shares: list[list[Part]] = [[] for _ in range(parts)]
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


def _part(index: int, entry: Entry, dim: int, start: int, length: int) -> Part:
    shape, offsets = list(entry.shape), list(entry.offsets)
    if shape:
        shape[dim], offsets[dim] = length, start
    shared = entry._replace(shape=tuple(shape), offsets=tuple(offsets), kind="shared")
    return Part(index, shared, dim, start, length)


def cut(tensor: torch.Tensor, part: Part) -> torch.Tensor:
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
        here = tensor.detach().to("cpu").contiguous()
        if here.nbytes:
            crc = crc32((ctypes.c_char * here.nbytes).from_address(here.data_ptr()), crc)
    return crc
