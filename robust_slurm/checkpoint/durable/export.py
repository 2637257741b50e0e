"""A durable checkpoint as one file of whole tensors. Needs torch.

``.safetensors``: tensors under flat names, written into the mapped file one block at a time.
``.pt``: the nested state by torch.save, plain values included; all of it is in memory once.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._traverse import set_element

from ..format.dtypes import TORCH, view
from ..format.layout import ALIGN, ITEM_SIZE, Entry
from . import tier
from .dcp.metadata import Tree
from .dcp.records import UnreadTypeError, read_tensor, read_value
from .files import DurableError, explain, remove
from .merge import Merged, Whole, merge
from .parts import Outline
from .verify import Read, verify


class Exported(NamedTuple):
    """Summary of an export."""

    tensors: int
    values: int
    """Plain values; a safetensors file holds none."""
    bytes: int
    left_out: tuple[str, ...] = ()
    """Names of plain values that torch.load would refuse, such as an array of numpy."""


def export(path: Path, out: Path, only: str = "", read: Read | None = None) -> Exported:
    """Write the committed step in ``path`` to the new file ``out``.

    ``only`` selects what stands under one name, such as ``model``, and takes it off the names.
    ``read`` is called with the bytes that were read. Everything is verified first. Raises
    DurableError; ``out`` is whole or not there.
    """
    problems = verify(path, read)
    if problems:
        raise DurableError(f"{path} is not exported: {problems[0].what}")
    manifest = tier.read_manifest(path)
    parts = tier.read_outlines(path, manifest)
    merged = merge(parts)
    tensors = _chosen(merged, only)
    if not tensors:
        raise DurableError(f"{path} has no tensors under {only!r}" if only else f"{path} is empty")
    tmp = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        left_out: list[str] = []
        if out.suffix == ".safetensors":
            values = 0
            _safetensors(path, parts, tensors, only, manifest.step, tmp, read)
        else:
            values = _pt(path, parts, merged, tensors, only, tmp, read, left_out)
        tmp.replace(out)
    except OSError as err:
        raise DurableError(explain(err, f"exporting {path}", out)) from None
    except (RuntimeError, ValueError) as err:
        raise DurableError(f"exporting {path} to {out}: {err}") from None
    finally:
        remove(tmp)
    return Exported(len(tensors), values, out.stat().st_size, tuple(left_out))


def _chosen(merged: Merged, only: str) -> list[Whole]:
    """All but other ranks' private copies, or what stands under ``only``."""
    found = [t for t in merged.tensors if t.kind != "private" or t.name == t.fqn]
    return [t for t in found if not only or t.name.startswith(only + ".")]


def _short(name: str, only: str) -> str:
    return name[len(only) + 1 :] if only else name


def _safetensors(
    path: Path,
    parts: Sequence[Outline],
    tensors: list[Whole],
    only: str,
    step: int,
    out: Path,
    read: Read | None,
) -> None:
    tensors = sorted(tensors, key=lambda t: -ITEM_SIZE[t.dtype])  # keeps all of them aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "step": str(step)}}
    places, at = [], 0
    for t in tensors:
        size = prod(t.shape) * ITEM_SIZE[t.dtype]
        header[_short(t.name, only)] = {
            "dtype": t.dtype,
            "shape": list(t.shape),
            "data_offsets": [at, at + size],
        }
        places.append(at)
        at += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    start = -(-(8 + len(raw)) // ALIGN) * ALIGN
    file = os.open(out, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Allocate all blocks now: a write into a mapping on a full disk would raise SIGBUS.
        os.posix_fallocate(file, 0, start + at)
        os.pwrite(file, (start - 8).to_bytes(8, "little") + raw.ljust(start - 8), 0)
        with mmap.mmap(file, start + at) as memory:
            for t, place in zip(tensors, places, strict=True):
                whole = Entry(t.name, t.dtype, t.shape, t.fqn, t.shape, (0,) * len(t.shape), t.kind)
                target = view(memory, start + place, whole)
                _fill(path, parts, t, target, read)
                del target
            memory.flush()
        os.fsync(file)
    finally:
        os.close(file)


def _pt(
    path: Path,
    parts: Sequence[Outline],
    merged: Merged,
    tensors: list[Whole],
    only: str,
    out: Path,
    read: Read | None,
    left_out: list[str],
) -> int:
    leaves: dict[str, Any] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for t in tensors:
        paths[t.name] = t.path
        if t.alias_of in leaves:
            leaves[t.name] = leaves[t.alias_of]
            continue
        leaves[t.name] = torch.empty(t.shape, dtype=TORCH[t.dtype], device="cpu")
        _fill(path, parts, t, leaves[t.name], read)
    values = 0
    for value in merged.values:
        if value.name not in leaves and (not only or value.name.startswith(only + ".")):
            try:
                leaves[value.name] = read_value(path, value.part, value.place, value.name)
            except UnreadTypeError:
                left_out.append(value.name)
                continue
            paths[value.name] = value.path
            values += 1
    state: dict[str, Any] = {}
    tree = Tree()
    for name, wanted in paths.items():
        keys = tree.enter(name, wanted)
        if keys is not None:
            set_element(state, keys, leaves[name])
    torch.save(state.get(only, state) if only else state, out)
    return values


def _fill(
    path: Path, parts: Sequence[Outline], whole: Whole, target: torch.Tensor, read: Read | None
) -> None:
    for chunk in whole.chunks():
        block = target
        for dim, (start, size) in enumerate(
            zip(chunk.entry.offsets, chunk.entry.shape, strict=True)
        ):
            block = block.narrow(dim, start, size)
        block.copy_(read_tensor(path, parts[chunk.rank], chunk.entry, chunk.place))
    if read is not None:
        read(prod(whole.shape) * ITEM_SIZE[whole.dtype])
