"""Snapshot files written plainly, for tests of what reads and writes their contents."""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.capture.beside.plain_values import Extra, PlainValue
from robust_slurm.checkpoint.capture.state import Item, OpenedSnapshot, Share, State
from robust_slurm.checkpoint.capture.values import Encoded
from robust_slurm.checkpoint.format.dtypes import view
from robust_slurm.checkpoint.format.layout import Snapshot, encode_header, lay_out, read_snapshot


def write(
    path: Path, items: Sequence[Item], values: Any, *,
    rank: int = 0, world: int = 1, needs: Sequence[int] | None = None,
    mesh: Mapping[str, int] | None = None,
) -> Path:  # fmt: skip
    """A complete snapshot of step 1. ``needs``: all ranks, unless said."""
    named = tuple(range(world) if needs is None else needs)
    by_name = {item.entry.name: item for item in items}
    assert len(by_name) == len(items), "names of entries are not unique"
    plan = lay_out([item.entry for item in items], len(json.dumps(values)) + 300 * len(items) + 999)
    snapshot = Snapshot(1, rank, world, 1, "1", dict(mesh or {}), named, values, plan.entries)
    header = encode_header(snapshot).ljust(plan.header_size)
    path.write_bytes(b"\0" * plan.size)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), plan.size) as memory:
        memory[8 : 8 + plan.header_size] = header
        memory[:8] = plan.header_size.to_bytes(8, "little")
        for entry, offset in zip(plan.entries, plan.offsets, strict=True):
            tensor = by_name[entry.name].tensor
            assert not tensor.requires_grad
            view(memory, offset, entry).copy_(tensor)
            # The view is gone before the map is closed: the reference just dropped was the last.
    return path


def source(path: Path) -> OpenedSnapshot:
    """A snapshot file opened for restoring; it stays mapped as long as its tensors live."""
    snapshot, plan = read_snapshot(str(path))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    tensors = {
        entry.name: view(memory, offset, entry)
        for entry, offset in zip(plan.entries, plan.offsets, strict=True)
    }
    return OpenedSnapshot(snapshot, tensors)


def scribble(path: Path) -> None:
    """Overwrite all data of a file in place, so that what still refers to it changes."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[:] = b"\xa5" * len(memory)


def capture(
    objects: Mapping[str, Any], *, rank: int, share: Share | None = None
) -> tuple[list[Item], dict[str, Encoded]]:
    """``State.capture`` once."""
    return State(objects, rank=rank, share=share).capture()


def restore(objects: Mapping[str, Any], sources: Sequence[OpenedSnapshot], *, rank: int) -> None:
    """``State.restore`` once."""
    State(objects, rank=rank).restore(sources)


def plain(values: Extra) -> dict[str, PlainValue]:
    """Values of ``extra`` as the Checkpointer gives them to State."""
    return {f"extra.{name}": PlainValue(values, name) for name in values}
