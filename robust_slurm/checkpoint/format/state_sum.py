"""Checksums of all the state in a snapshot, the same whatever file it lies in. Standard library.

The digest of a file (``digest``) covers its header as well: the incarnation, the room that it keeps
free, the order of its tensors. These checksums cover each tensor under its name, and all other
values as JSON with sorted keys, so that the same state of two incarnations has the same checksums.
They depend on which rank keeps which part of a shared state: ``parts`` shows whether that is equal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from .crc import crc32
from .digest import piece, range_crc
from .layout import Entry, parse_header
from .threads import read_each

PHASE = "check"  # heartbeat phase of a rank that waits while its state is compared


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

    def read(i: int, buffer: memoryview) -> None:
        found[i] = range_crc(fd, offsets[i], entries[i].nbytes, buffer)

    read_each(read, piece, len(entries), threads, "state-sum")
    return found
