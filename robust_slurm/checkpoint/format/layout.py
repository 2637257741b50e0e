"""The snapshot file: one rank's part of one step, as a safetensors file that any tool can open.

A file is ``u64 length | JSON header, padded with spaces | tensor data without gaps``. While it is
being written its first eight bytes are zero, so a torn snapshot is no safetensors file at all; the
length is stored last. Facts for which safetensors has no field stand as JSON in
``__metadata__["robust"]`` (``Snapshot``). Standard library only; input is treated as hostile.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

VERSION = 1
ALIGN = 64  # bytes: the data starts at a multiple, so every tensor is aligned to its item size
ROOM = 4096  # bytes of header kept free for values that grow from step to step
MAX_HEADER = 100 << 20  # the limit of the safetensors library
SUFFIX = ".safetensors"

ITEM_SIZE: Mapping[str, int] = {
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
"""Bytes per item by the name of the type in safetensors."""


class LayoutError(ValueError):
    """The file is not a complete snapshot, or is of another version."""


class Entry(NamedTuple):
    """One tensor, or one block of a larger one, in a snapshot."""

    name: str
    """Unique in the file."""
    dtype: str
    """safetensors' name, a key of ITEM_SIZE."""
    shape: tuple[int, ...]
    fqn: str
    """Full name in the whole state, path joined by dots: ``model.0.weight``."""
    global_shape: tuple[int, ...]
    """Shape of the whole tensor that this is a block of; ``shape`` itself for a whole one."""
    offsets: tuple[int, ...]
    """Indices of the block's first element in it."""
    kind: str
    """``shared``: data-parallel peers hold the same, each keeps a part of it; ``block``: this
    rank's block of a distributed tensor; ``piece``: a part of a block that peers hold as well
    (HSDP); ``private``: this rank's own."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]


class Snapshot(NamedTuple):
    """Contents of a snapshot file, except the tensors' bytes."""

    step: int
    rank: int
    world: int
    epoch: int
    job: str
    mesh: dict[str, int]
    """Name of each dimension → its size, in the order of torch's DeviceMesh (the last varies
    fastest); empty when the script named none."""
    needs: tuple[int, ...]
    """Ranks whose snapshots of the same step are needed to restore this rank; always itself too."""
    values: Any
    """The values that are no tensors, encoded by ``values``."""
    entries: tuple[Entry, ...]
    same: int = -1
    """Checksum of what the ranks of ``needs`` hold alike, as this rank held it (see ``sharing``);
    -1: nothing."""
    line: int = 0
    """The timeline within the epoch: 0, or the number that the ranks agreed on when the user's
    script or launcher started all of them anew within it. A later one has a higher number."""

    @property
    def attempt(self) -> str:
        """Name of its timeline's files in the durable directory."""
        return f"{self.job or 'nojob'}.e{self.epoch}" + (f"-{self.line}" if self.line else "")


class FileLayout(NamedTuple):
    """Layout of a file of ``size`` bytes; the header starts at byte 8."""

    header_size: int
    offsets: tuple[int, ...]
    """Offset of each entry's data in bytes, from the start of the file."""
    entries: tuple[Entry, ...]
    """Largest item size first, so that all are aligned without gaps; of each, frozen ones last."""
    size: int


def lay_out(
    entries: Sequence[Entry], header_bytes: int, frozen: Collection[str] = frozenset()
) -> FileLayout:
    """Plan a file whose header is about ``header_bytes`` long now (see ``encode_header``).

    ``frozen``: names of tensors that hardly ever change. They lie together, so that chunks with
    only such tensors need not be sent again."""
    ordered = tuple(sorted(entries, key=lambda e: (-ITEM_SIZE[e.dtype], e.name in frozen)))
    start = -(-(8 + header_bytes + ROOM) // ALIGN) * ALIGN
    offsets, at = [], start
    for entry in ordered:
        offsets.append(at)
        at += entry.nbytes
    return FileLayout(start - 8, tuple(offsets), ordered, at)


def encode_header(snapshot: Snapshot) -> bytes:
    """The header of a snapshot whose entries are in a FileLayout's order, without padding.

    Raises LayoutError when it is larger than readers accept.
    """
    about = {"same": snapshot.same, **snapshot._asdict()}  # before any name: see form.Form
    about["version"] = VERSION
    about["entries"] = {
        name: (fqn, global_shape, offsets, kind)
        for name, _, _, fqn, global_shape, offsets, kind in snapshot.entries
    }
    header: dict[str, Any] = {
        "__metadata__": {
            "format": "robust-slurm",
            "robust": json.dumps(about, separators=(",", ":")),
        }
    }
    at = 0
    for entry in snapshot.entries:
        end = at + entry.nbytes
        header[entry.name] = {
            "dtype": entry.dtype,
            "shape": entry.shape,
            "data_offsets": (at, end),
        }
        at = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    if len(raw) > MAX_HEADER:
        raise LayoutError(
            f"a header of {len(raw)} bytes is over safetensors' limit of {MAX_HEADER}"
        )
    return raw


def parse_header(raw: bytes | memoryview, file_size: int) -> tuple[Snapshot, FileLayout]:
    """Read a whole header (``raw`` starts at byte 0 of the file and holds at least the header).

    Raises LayoutError for a torn, foreign or inconsistent one.
    """
    length = int.from_bytes(raw[:8], "little")
    if length == 0:
        raise LayoutError("torn: it was still being written")
    if not 2 <= length <= MAX_HEADER or 8 + length > file_size or len(raw) < 8 + length:
        raise LayoutError(f"header of {length} bytes in a file of {file_size}")
    try:
        header = json.loads(bytes(raw[8 : 8 + length]))
        about = json.loads(header.pop("__metadata__")["robust"])
        if about["version"] != VERSION:
            raise LayoutError(f"snapshot of version {about['version']}, this reads {VERSION}")
        entries, offsets, at = [], [], 8 + length
        # All numbers are checked together, but the shapes before anything is multiplied.
        _check_whole(chain.from_iterable(item["shape"] for item in header.values()))
        numbers: list[Any] = []
        for name, (fqn, global_shape, starts, kind) in about["entries"].items():
            item = header.pop(name)
            shape, (begin, end) = item["shape"], item["data_offsets"]
            numbers += global_shape
            numbers += starts
            numbers += (begin, end)
            entry = Entry(
                name, item["dtype"], tuple(shape), str(fqn), tuple(global_shape), tuple(starts),
                str(kind),
            )  # fmt: skip
            if 8 + length + begin != at:
                raise LayoutError(f"tensor {name} does not lie where it should")
            size = prod(shape) * ITEM_SIZE[entry.dtype]
            if end - begin != size:
                raise LayoutError(f"tensor {name} has {end - begin} bytes")
            entries.append(entry)
            offsets.append(at)
            at += size
        _check_whole(numbers)
        if header or at != file_size:
            raise LayoutError(f"its tensors end at byte {at} of {file_size}")
        snapshot = Snapshot(
            int(about["step"]), int(about["rank"]), int(about["world"]), int(about["epoch"]),
            str(about["job"]), {str(k): int(v) for k, v in about["mesh"].items()},
            tuple(map(int, about["needs"])), about["values"], tuple(entries),
            int(about.get("same", -1)), int(about.get("line", 0)),
        )  # fmt: skip
    except LayoutError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise LayoutError(f"its header cannot be read: {type(err).__name__}: {err}") from None
    return snapshot, FileLayout(length, tuple(offsets), tuple(entries), file_size)


def _check_whole(numbers: Iterable[Any]) -> None:
    found = list(numbers)
    if not set(map(type, found)) <= {int} or min(found, default=0) < 0:
        raise LayoutError("a shape or an offset is no whole number from 0 on")


def read_snapshot(path: str) -> tuple[Snapshot, FileLayout]:
    """The header of a snapshot file. Raises LayoutError, OSError."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if length > MAX_HEADER:
            raise LayoutError(f"{path}: header of {length} bytes in a file of {size}")
        return parse_header(head + file.read(length), size)
