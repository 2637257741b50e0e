"""Checksums of all the state in a snapshot, whatever file it lies in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from robust_slurm.checkpoint.format.layout import Entry, Snapshot, encode_header, lay_out
from robust_slurm.checkpoint.format.state_sum import StateSum, of_file

VALUES = {"lr": 0.1, "seen": {"s": ["b", "a"]}, "order": ["b", "a"]}


def entry(name: str, dtype: str, items: int) -> Entry:
    return Entry(name, dtype, (items,), name, (items,), (0,), "private")


def summed(
    tmp_path: Path,
    content: dict[str, bytes],
    values: Any = VALUES,
    *,
    epoch: int = 1,
    step: int = 5,
    room: int = 0,
) -> StateSum:
    """Sum a file with these tensors; ``room``: more bytes kept free in its header."""
    entries = [entry(name, "U8", len(data)) for name, data in content.items()]
    about = Snapshot(step, 3, 4, epoch, f"job.{epoch}", {}, (3,), values, ())
    plan = lay_out(entries, len(encode_header(about._replace(entries=tuple(entries)))) + room)
    header = encode_header(about._replace(entries=plan.entries))
    data = b"".join(content[each.name] for each in plan.entries)
    path = tmp_path / "snapshot"
    path.write_bytes(plan.header_size.to_bytes(8, "little") + header.ljust(plan.header_size) + data)
    with path.open("rb") as file:
        return of_file(file.fileno(), path.stat().st_size, threads=2)


def test_the_same_state_in_another_file(tmp_path: Path) -> None:
    """… of another incarnation, laid out in another way, with sets in another order."""
    big = os.urandom(3 << 20)
    one = summed(tmp_path, {"a": b"weights", "b": big})
    turned = {"order": ["b", "a"], "seen": {"s": ["a", "b"]}, "lr": 0.1}
    two = summed(tmp_path, {"b": big, "a": b"weights"}, turned, epoch=2, room=1 << 17)
    assert two == one._replace(epoch=2)


def test_each_kind_of_difference(tmp_path: Path) -> None:
    one = summed(tmp_path, {"a": b"weights", "b": b"moments"})
    bit = summed(tmp_path, {"a": b"weights", "b": b"momentr"})
    assert bit == one._replace(tensors=bit.tensors) and bit.tensors != one.tensors
    swapped = summed(tmp_path, {"a": b"moments", "b": b"weights"})
    assert (swapped.parts, swapped.tensors != one.tensors) == (one.parts, True)
    value = summed(tmp_path, {"a": b"weights", "b": b"moments"}, {**VALUES, "lr": 0.2})
    assert value == one._replace(values=value.values) and value.values != one.values
    part = summed(tmp_path, {"a": b"weights", "b": b"mom"})
    assert part.parts != one.parts
