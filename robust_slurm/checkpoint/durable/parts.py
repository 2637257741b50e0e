"""The record of one rank's part of a step: ``<attempt>-rank-<rank>.json`` beside its data files.

A part tells where each tensor's bytes lie and holds every plain value as JSON, so that reading a
checkpoint back unpickles nothing. Version 2 is five lines: head, contents, places, values (JSON
each) and the form (JSON, deflated). The form is what thousands of ranks have in common: names,
types, shapes. Whoever merges parts parses each form once (``Outline``). Standard library only; what
is read is treated as hostile.
"""

from __future__ import annotations

import json
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import prod
from operator import le
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ..format.layout import ITEM_SIZE, Entry, Snapshot
from .files import DurableError, encode, explain, is_plain_name, read_inside

VERSION = 2
MAX_PART = 256 << 20  # bytes; a snapshot's header, which holds the same, has at most 100 MiB
_LINES = 5
_ATTEMPT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_ERRORS = (
    KeyError, TypeError, AttributeError, IndexError, RecursionError, OverflowError, ValueError,
    zlib.error,
)  # fmt: skip


class FileSpan(NamedTuple):
    """Place of a record: ``file`` is an index into ``Part.files``."""

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
    """Flattened as by DCP's planner: ``optimizer.param_groups.0.lr``."""
    path: tuple[str | int, ...]
    """Keys that lead to it in the nested state."""
    place: FileSpan


Groups = tuple[tuple[str, tuple[str, ...]], ...]
Aliases = Mapping[str, tuple[str, tuple[str | int, ...]]]
Identity = tuple[str, int, int, int]
"""Identity of a part: attempt, step, rank, world."""


class Part(NamedTuple):
    """One rank's part of a step."""

    attempt: str
    snapshot: Snapshot
    """The header of the snapshot file."""
    source: list[int]
    """Digest of the snapshot file that was written."""
    files: tuple[File, ...]
    places: tuple[FileSpan, ...]
    """Places of ``snapshot.entries``, in their order."""
    paths: Mapping[str, tuple[str | int, ...]]
    """fqn → keys that lead to the tensor in the nested state."""
    plain: tuple[Plain, ...]
    groups: Groups
    """Parameter groups of optimizers: name (``optimizer.param_groups.0``) → parameters."""
    contents: tuple[str, ...] = ()
    """For each private entry, a mark that is equal on ranks that hold the same (``content_of``).
    Empty: unknown for all."""
    aliases: Aliases = MappingProxyType({})
    """Name → (fqn, path) of tensors that have a second name, such as a tied weight."""

    @property
    def identity(self) -> Identity:
        return (self.attempt, *self.snapshot[:3])

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)


class CommonForm:
    """The common form of all ranks that hold blocks of the same shapes."""

    def __init__(self, data: Any) -> None:
        """Parse the record. Raises what ``_ERRORS`` lists."""
        self.entries = tuple(_entry(*entry) for entry in data["entries"])
        """The entries, each with the offsets of an uncut tensor: all 0."""
        self.paths = {text(fqn): _path(path) for fqn, path in data["paths"].items()}
        self.plain = tuple((text(name), _path(path)) for name, path in data["plain"])
        self.groups: Groups = tuple(
            (text(name), tuple(text(fqn) for fqn in params)) for name, params in data["groups"]
        )
        self.aliases: Aliases = {  # earlier versions wrote none
            text(name): (text(fqn), _path(path)) for name, fqn, path in data.get("aliases", ())
        }
        self.private = tuple(i for i, e in enumerate(self.entries) if e.kind == "private")
        self.shares = any(e.kind == "shared" for e in self.entries)
        self.cuts = tuple(_cuts(entry) for entry in self.entries)
        """For each entry, the dimensions that other ranks hold parts of."""
        self.first: list[int] = []
        """For each entry, the index in ``Outline.offsets`` where its offsets begin."""
        self.limits = array("q")
        """The highest offset that each of ``Outline.offsets`` may be."""
        for entry, cuts in zip(self.entries, self.cuts, strict=True):
            self.first.append(len(self.limits))
            empty = not prod(entry.shape)
            self.limits.extend(
                (1 << 62) if empty else entry.global_shape[d] - entry.shape[d] for d in cuts
            )


class Outline:
    """One rank's part as far as merging needs it: small, its form shared with other ranks'."""

    def __init__(self, lines: list[bytes], known: dict[bytes, Any]) -> None:
        """``known``: what was parsed before, by its bytes. Raises what ``_ERRORS`` lists."""
        head = json.loads(lines[0])
        self.attempt: str = head["attempt"]
        if not is_attempt(self.attempt):
            raise ValueError("attempt")
        self.step, self.rank, self.world = (count(head[k]) for k in ("step", "rank", "world"))
        self.mesh = {text(name): count(size) for name, size in head["mesh"].items()}
        self.needs = tuple(map(count, head["needs"]))
        self.same = count(head["same"] + 1) - 1
        self.files = tuple(
            File(_data_name(n), count(s), [count(c) for c in d]) for n, s, d in head["files"]
        )
        if lines[4] not in known:
            known[lines[4]] = CommonForm(json.loads(_inflate(lines[4])))
        self.form: CommonForm = known[lines[4]]
        if lines[1] not in known:
            known[lines[1]] = tuple(map(text, json.loads(lines[1])))
        self.contents: tuple[str, ...] = known[lines[1]]
        if self.contents and len(self.contents) != len(self.form.private):
            raise ValueError("not one content for each private tensor")
        self.offsets = array("q", head["offsets"])
        if len(self.offsets) != len(self.form.limits) or min(self.offsets, default=0) < 0:
            raise ValueError("not one offset for each cut")
        if not all(map(le, self.offsets, self.form.limits)):
            raise ValueError("a block is not inside its tensor")
        self._places = lines[2]

    @property
    def identity(self) -> Identity:
        return self.attempt, self.step, self.rank, self.world

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    def entry(self, index: int) -> Entry:
        """One of ``form.entries``, where this rank holds it."""
        form = self.form
        entry, cuts, first = form.entries[index], form.cuts[index], form.first[index]
        if not cuts:
            return entry
        offsets = list(entry.offsets)
        for at, dim in enumerate(cuts, first):
            offsets[dim] = self.offsets[at]
        return entry._replace(offsets=tuple(offsets))

    def place(self, index: int) -> FileSpan:
        """Return the place of an entry; plain values follow the entries. Raises ValueError."""
        return FileSpan(*self._flat[3 * index : 3 * index + 3])

    @cached_property
    def _flat(self) -> array[int]:
        try:
            flat = array("q", json.loads(self._places))
            if len(flat) != 3 * (len(self.form.entries) + len(self.form.plain)):
                raise ValueError("not one place for each record")
            for file, offset, length in _triples(flat):
                if min(file, offset, length) < 0 or offset + length > self.files[file].size:
                    raise ValueError("a record is not inside its file")
            # A record holds the tensor and a little more.
            for entry, length in zip(self.form.entries, flat[2::3], strict=False):
                if length < entry.nbytes:
                    raise ValueError(f"{entry.name}: its record is too short")
        except _ERRORS as err:
            raise ValueError(f"{type(err).__name__}: {err}") from None
        return flat


def is_attempt(name: object) -> bool:
    """True for an attempt's name. It begins with a letter or digit, DCP's names with ``__``."""
    return isinstance(name, str) and _ATTEMPT.fullmatch(name) is not None


def part_name(attempt: str, rank: int) -> str:
    return f"{attempt}-rank-{rank}.json"


def data_prefix(attempt: str, rank: int) -> str:
    """Prefix of the names of a rank's data files."""
    return f"{attempt}-{rank}_"


def encode_part(part: Part) -> bytes:
    return b"\n".join(_lines(part))


def _lines(part: Part) -> list[bytes]:
    about, entries = part.snapshot, part.snapshot.entries
    head = {
        "version": VERSION, "attempt": part.attempt, "step": about.step, "rank": about.rank,
        "world": about.world, "epoch": about.epoch, "job": about.job, "mesh": about.mesh,
        "needs": about.needs, "same": about.same, "source": part.source, "files": part.files,
        "offsets": [e.offsets[d] for e in entries for d in _cuts(e)],
    }  # fmt: skip
    places = [*part.places, *(plain.place for plain in part.plain)]
    form: dict[str, Any] = {
        "entries": [
            (e.name, e.dtype, e.shape, e.fqn if e.fqn != e.name else None, e.global_shape, e.kind)
            for e in entries
        ],
        "paths": part.paths,
        "plain": [(plain.name, plain.path) for plain in part.plain],
        "groups": part.groups,
    }
    if part.aliases:
        form["aliases"] = [(name, fqn, path) for name, (fqn, path) in part.aliases.items()]
    return [
        encode(head), encode(part.contents), encode([n for place in places for n in place]),
        encode(about.values), zlib.compress(encode(form), 1),
    ]  # fmt: skip


def parse_part(raw: bytes) -> Part:
    """Parse a part. Raises ValueError for anything that no version of this can have written."""
    try:
        lines = _split(raw)
        head, found = json.loads(lines[0]), Outline(lines, {})
        form = found.form
        return Part(
            attempt=found.attempt,
            snapshot=Snapshot(
                step=found.step, rank=found.rank, world=found.world, epoch=count(head["epoch"]),
                job=text(head["job"]), mesh=found.mesh, needs=found.needs,
                values=json.loads(lines[3]),
                entries=tuple(found.entry(i) for i in range(len(form.entries))), same=found.same,
            ),
            source=[count(crc) for crc in head["source"]],
            files=found.files,
            places=tuple(found.place(i) for i in range(len(form.entries))),
            paths=form.paths,
            plain=tuple(
                Plain(name, path, found.place(i))
                for i, (name, path) in enumerate(form.plain, len(form.entries))
            ),
            groups=form.groups,
            contents=found.contents,
            aliases=form.aliases,
        )  # fmt: skip
    except _ERRORS as err:
        raise ValueError(f"{type(err).__name__}: {err}") from None


def parse_outline(raw: bytes, known: dict[bytes, Any]) -> Outline:
    """Parse what merging needs. Raises ValueError. ``known``: a cache of parsed lines by their
    bytes, kept from call to call; two threads must not use it at once."""
    try:
        return Outline(_split(raw), known)
    except _ERRORS as err:
        raise ValueError(f"{type(err).__name__}: {err}") from None


def read_part(directory: Path, name: str) -> Part:
    """Read a part. Raises DurableError."""
    try:
        return parse_part(read_inside(directory, name, MAX_PART))
    except OSError as err:
        raise DurableError(explain(err, "reading a rank's part", directory / name)) from None
    except ValueError as err:
        raise DurableError(f"{directory / name} is no rank's part that this reads: {err}") from None


def _split(raw: bytes) -> list[bytes]:
    lines = raw.split(b"\n", _LINES - 1)
    version = json.loads(lines[0])["version"]
    if version != VERSION:
        raise ValueError(f"version {version}, this reads {VERSION}")
    if len(lines) != _LINES:
        raise ValueError(f"{len(lines)} lines")
    return lines


def _inflate(raw: bytes) -> bytes:
    inflater = zlib.decompressobj()
    found = inflater.decompress(raw, MAX_PART)
    if not inflater.eof:
        raise ValueError("its form is cut off, or too large")
    return found


def _entry(name: Any, dtype: Any, shape: Any, fqn: Any, whole: Any, kind: Any) -> Entry:
    """``fqn`` None: as ``name``."""
    entry = Entry(
        text(name), text(dtype), tuple(map(count, shape)), text(name if fqn is None else fqn),
        tuple(map(count, whole)), (0,) * len(shape), text(kind),
    )  # fmt: skip
    if entry.dtype not in ITEM_SIZE:
        raise ValueError(f"{entry.name}: dtype {entry.dtype}")
    if len(entry.shape) != len(entry.global_shape):
        raise ValueError(f"{entry.name}: shapes of different lengths")
    return entry


def _cuts(entry: Entry) -> tuple[int, ...]:
    both = zip(entry.shape, entry.global_shape, strict=True)
    return tuple(dim for dim, (size, of) in enumerate(both) if size != of)


def _triples(flat: array[int]) -> Iterator[tuple[int, int, int]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


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
    """Return a text, checked. Raises ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"not a text: {value!r}")
    return value
