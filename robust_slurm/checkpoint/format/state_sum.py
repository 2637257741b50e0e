"""Checksums of all the state in a snapshot, the same whatever file it lies in. Standard library.

The digest of a file (``digest``) covers its header as well: the incarnation, the room that it keeps
free, the order of its tensors. Here each tensor counts under its name, and what is no tensor as
JSON with sorted keys, so that the same state of two incarnations has the same checksums. They
depend on who keeps which part of a shared state: ``parts`` tells whether that is the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from .crc import crc32
from .digest import FileChangedError
from .layout import Entry, parse_header
from .threads import share

PHASE = "check"  # heartbeat's, of a rank that waits for its state to be compared
_PIECE = 1 << 20  # bytes, read and summed while they are in the processor's cache


class StateSum(NamedTuple):
    """Sums over one rank's snapshot of a step."""

    owner: int
    epoch: int
    parts: int
    """Checksum of names, types and shapes: it shows which part of the state this is."""
    tensors: int
    """Checksum of all bytes of the tensors."""
    values: int
    """Checksum of all that is no tensor: generators, loaders, schedules, extra."""


def of_file(fd: int, size: int, threads: int = 1) -> StateSum:
    """Read a whole snapshot. Raises LayoutError, OSError."""
    head = os.pread(fd, 8, 0)
    length = min(int.from_bytes(head, "little"), size)
    snapshot, plan = parse_header(head + os.pread(fd, length, 8), size)
    order = sorted(range(len(plan.entries)), key=lambda i: plan.entries[i].name)
    sums = _sums(fd, plan.entries, plan.offsets, threads)
    parts = tensors = 0
    for i in order:
        entry = plan.entries[i]
        parts = crc32(repr(tuple(entry)).encode(), parts)
        tensors = crc32(b"%08x" % sums[i], tensors)
    values = _text(_ordered(snapshot.values))
    return StateSum(snapshot.rank, snapshot.epoch, parts, tensors, crc32(values.encode()))


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _ordered(value: Any) -> Any:
    """Sets (see ``values``) in an order that does not depend on the process."""
    if isinstance(value, list):
        return [_ordered(each) for each in value]
    if not isinstance(value, dict):
        return value
    found = {key: _ordered(each) for key, each in value.items()}
    for tag in found.keys() & {"s", "fs"}:
        if len(found) == 1 and isinstance(found[tag], list):
            found[tag].sort(key=_text)
    return found


def _sums(fd: int, entries: Sequence[Entry], offsets: Sequence[int], threads: int) -> list[int]:
    found = [0] * len(entries)
    todo = iter(range(len(entries)))  # ``next`` on it is atomic
    failed: list[OSError] = []

    def work() -> None:
        buffer = memoryview(bytearray(_PIECE))
        try:
            for i in todo:
                found[i] = _crc(fd, offsets[i], entries[i].nbytes, buffer)
                if failed:
                    return
        except OSError as err:
            failed.append(err)

    share(work, min(threads, len(entries)), "state-sum")
    if failed:
        raise failed[0]
    return found


def _crc(fd: int, at: int, left: int, buffer: memoryview) -> int:
    crc = 0
    while left:
        piece = buffer[: min(left, len(buffer))]
        got = os.preadv(fd, [piece], at)
        if not got:
            raise FileChangedError(f"the file ends at byte {at}")
        crc = crc32(piece[:got], crc)
        at += got
        left -= got
    return crc
