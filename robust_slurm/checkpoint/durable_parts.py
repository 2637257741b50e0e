"""What one rank wrote for one step: ``<attempt>-rank-<rank>.json`` beside its data files.

It says of each tensor where its bytes lie, and holds every plain value as JSON, so that reading a
checkpoint back unpickles nothing. Standard library only; what is read is treated as hostile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from .durable_files import DurableError, encode, explain, is_plain_name, read_inside
from .layout import ITEM_SIZE, Entry, Snapshot

VERSION = 1
MAX_PART = 256 << 20  # bytes; a snapshot's header, which holds the same, has at most 100 MiB
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Place(NamedTuple):
    """Where a record lies: ``file`` counts in ``Part.files``."""

    file: int
    offset: int
    length: int


class File(NamedTuple):
    """One data file."""

    name: str
    size: int
    digest: list[int]


class Plain(NamedTuple):
    """One value that is no tensor, as a pickled record for others."""

    name: str
    """As DCP's planner flattens it: ``optimizer.param_groups.0.lr``."""
    path: tuple[str | int, ...]
    """Keys that lead to it in the nested state."""
    place: Place


class Part(NamedTuple):
    """One rank's part of a step."""

    attempt: str
    snapshot: Snapshot
    """As it was in the snapshot file."""
    source: list[int]
    """Digest of the snapshot file that was written."""
    files: tuple[File, ...]
    places: tuple[Place, ...]
    """Of each of ``snapshot.entries``."""
    paths: Mapping[str, tuple[str | int, ...]]
    """fqn → keys that lead to the tensor in the nested state."""
    plain: tuple[Plain, ...]
    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """Of each parameter group of an optimizer: the name it has (``optimizer.param_groups.0``) and
    its parameters."""

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


def is_attempt(name: object) -> bool:
    """Begins with a letter or digit: what DCP itself writes begins with ``__``."""
    return isinstance(name, str) and _ATTEMPT.fullmatch(name) is not None


def part_name(attempt: str, rank: int) -> str:
    return f"{attempt}-rank-{rank}.json"


def data_prefix(attempt: str, rank: int) -> str:
    """What the names of a rank's data files begin with."""
    return f"{attempt}-{rank}_"


def encode_part(part: Part) -> bytes:
    snapshot = part.snapshot._asdict()
    snapshot["entries"] = [list(entry) for entry in part.snapshot.entries]
    return encode(
        {
            "version": VERSION,
            "attempt": part.attempt,
            "snapshot": snapshot,
            "source": part.source,
            "files": part.files,
            "places": part.places,
            "paths": part.paths,
            "plain": part.plain,
            "groups": part.groups,
        }
    )


def parse_part(raw: bytes) -> Part:
    """Raises ValueError for anything that this version cannot have written."""
    try:
        return _part(json.loads(raw))
    except (KeyError, TypeError, AttributeError, IndexError, RecursionError, ValueError) as err:
        raise ValueError(f"{type(err).__name__}: {err}") from None


def read_part(directory: Path, name: str) -> Part:
    """Raises DurableError."""
    try:
        return parse_part(read_inside(directory, name, MAX_PART))
    except OSError as err:
        raise DurableError(explain(err, "reading a rank's part", directory / name)) from None
    except ValueError as err:
        raise DurableError(f"{directory / name} is no rank's part that this reads: {err}") from None


def _part(data: dict[str, Any]) -> Part:
    if data["version"] != VERSION:
        raise ValueError(f"version {data['version']}, this reads {VERSION}")
    if not is_attempt(data["attempt"]):
        raise ValueError("attempt")
    about = data["snapshot"]
    snapshot = Snapshot(
        step=count(about["step"]),
        rank=count(about["rank"]),
        world=count(about["world"]),
        epoch=count(about["epoch"]),
        job=text(about["job"]),
        mesh={text(name): count(size) for name, size in about["mesh"].items()},
        needs=tuple(count(rank) for rank in about["needs"]),
        values=about["values"],
        entries=tuple(_entry(*entry) for entry in about["entries"]),
        same=count(about.get("same", -1) + 1) - 1,
    )
    files = tuple(File(_data_name(n), count(s), [count(c) for c in d]) for n, s, d in data["files"])
    places = tuple(_place(files, place) for place in data["places"])
    if len(places) != len(snapshot.entries):
        raise ValueError("not one place for each tensor")
    for entry, place in zip(snapshot.entries, places, strict=True):
        if place.length < entry.nbytes:  # a record holds the tensor and a little more
            raise ValueError(f"{entry.name}: its record is too short")
    return Part(
        attempt=data["attempt"],
        snapshot=snapshot,
        source=[count(crc) for crc in data["source"]],
        files=files,
        places=places,
        paths={text(fqn): _path(path) for fqn, path in data["paths"].items()},
        plain=tuple(
            Plain(text(name), _path(path), _place(files, place))
            for name, path, place in data["plain"]
        ),
        groups=tuple(
            (text(name), tuple(text(fqn) for fqn in params)) for name, params in data["groups"]
        ),
    )


def _entry(
    name: Any, dtype: Any, shape: Any, fqn: Any, whole: Any, offsets: Any, kind: Any
) -> Entry:
    entry = Entry(
        text(name), text(dtype), tuple(map(count, shape)), text(fqn),
        tuple(map(count, whole)), tuple(map(count, offsets)), text(kind),
    )  # fmt: skip
    if entry.dtype not in ITEM_SIZE:
        raise ValueError(f"{entry.name}: dtype {entry.dtype}")
    if not len(entry.shape) == len(entry.global_shape) == len(entry.offsets):
        raise ValueError(f"{entry.name}: shapes of different lengths")
    if prod(entry.shape):
        for size, start, of in zip(entry.shape, entry.offsets, entry.global_shape, strict=True):
            if start + size > of:
                raise ValueError(f"{entry.name}: its block is not inside the tensor")
    return entry


def _place(files: tuple[File, ...], place: Any) -> Place:
    file, offset, length = (count(number) for number in place)
    if offset + length > files[file].size:
        raise ValueError(f"a record ends behind the end of {files[file].name}")
    return Place(file, offset, length)


def _path(path: Any) -> tuple[str | int, ...]:
    keys = tuple(key if isinstance(key, str) else count(key) for key in path)
    if not keys:
        raise ValueError("empty path")
    return keys


def _data_name(name: Any) -> str:
    if not is_plain_name(name):
        raise ValueError(f"file name {name!r}")
    return str(name)


def count(value: Any) -> int:
    """A whole number, not negative. Raises ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"not a count: {value!r}")
    return value


def text(value: Any) -> str:
    """Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value
