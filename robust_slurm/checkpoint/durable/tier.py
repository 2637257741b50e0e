"""The durable tier's directory: which steps are there, and what belongs to one.

``<directory>/step-00000100/`` holds the ranks' data and parts, ``.metadata`` for
torch.distributed.checkpoint, and ``manifest.json``. The manifest is renamed into place last of all:
a step that has one is committed, any other does not count. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from robust_slurm.text import counted

from .files import DurableError, digest_of, encode, explain, is_plain_name, read_inside
from .marks import Mark
from .marks import read as read_mark
from .marks import write as write_mark
from .parts import (
    MAX_PART,
    Identity,
    Outline,
    Part,
    count,
    is_attempt,
    parse_outline,
    parse_part,
    text,
)

VERSION = 1
MANIFEST = "manifest.json"
METADATA = ".metadata"
COMMIT_SUFFIX = "-commit.json"
MAX_MANIFEST = 64 << 20  # bytes; about 150 a rank
P = TypeVar("P", Part, Outline)
_STEP = re.compile(r"step-(\d{8,18})")


class PartFile(NamedTuple):
    """A rank's part as the manifest pins it."""

    rank: int
    name: str
    size: int
    digest: list[int]


class Renamed(NamedTuple):
    """A tensor with another name in DCP, as ranks of another stage use its name for theirs."""

    name: str
    fqn: str
    ranks: tuple[int, ...]


class Manifest(NamedTuple):
    """Manifest of a step; with it the step is committed."""

    step: int
    attempt: str
    world: int
    mesh: dict[str, int]
    time: float
    """Time of the commit, seconds since 1970."""
    bytes: int
    """Bytes of all data files."""
    parts: tuple[PartFile, ...]
    """The files of the parts, by rank."""
    metadata: tuple[int, list[int]]
    """Size and digest of ``.metadata``; size 0: there is none, as there would be too much in it."""
    renamed: tuple[Renamed, ...]


class DurableStep(NamedTuple):
    """A step that can be loaded."""

    step: int
    path: Path
    attempt: str
    world: int
    bytes: int
    mark: Mark


def step_dir(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"step-{step:08d}"


def apart_mark(directory: str | Path, attempt: str) -> Path:
    """Path of the file that exists while ranks of an attempt share a state that they no longer hold
    alike. A commit makes it, so that all ranks see it; the next good commit removes it."""
    return Path(directory) / f".{attempt}-apart"


def step_of(path: Path) -> int | None:
    """The step that a directory of this name belongs to; None if it is no such name."""
    match = _STEP.fullmatch(path.name)
    if match is None or path.name != f"step-{int(match[1]):08d}":
        return None
    return int(match[1])


def step_dirs(directory: str | Path) -> list[tuple[int, Path]]:
    """All steps' directories, committed or not, oldest step first.

    [] when there is no such directory. Raises DurableError if it cannot be read.
    """
    found = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                step = step_of(Path(entry.name))
                if step is not None and entry.is_dir(follow_symlinks=False):
                    found.append((step, Path(directory) / entry.name))
    except FileNotFoundError:
        return []
    except OSError as err:
        raise DurableError(explain(err, "looking for checkpoints", directory)) from None
    return sorted(found)


def committed(directory: str | Path) -> list[DurableStep]:
    """Steps that can be loaded, oldest first. Raises DurableError as ``step_dirs``.

    Only manifests are read; ``verify`` reads the data.
    """
    return list_steps(directory)[0]


def list_steps(directory: str | Path) -> tuple[list[DurableStep], dict[int, str]]:
    """Return ``committed``, and the steps whose manifest cannot be read: step → reason."""
    found, unreadable = [], {}
    for step, path in step_dirs(directory):
        try:
            m = read_manifest(path)
            mark = read_mark(path, m.attempt)
            found.append(DurableStep(step, path, m.attempt, m.world, m.bytes, mark))
        except DurableError as err:
            if is_committed(path):
                unreadable[step] = str(err)
    return found, unreadable


def newest(directory: str | Path) -> DurableStep | None:
    """Return the newest committed step. Raises DurableError as ``step_dirs``."""
    return max(committed(directory), key=lambda each: each.step, default=None)


def is_committed(path: Path) -> bool:
    """True if there is a manifest, readable or not, or if the directory cannot be looked into."""
    try:
        return stat.S_ISREG((path / MANIFEST).lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a directory of another user, a failing disk: not the same as not there
        return True


def read_manifest(path: Path) -> Manifest:
    """The manifest of one step's directory. Raises DurableError."""
    try:
        raw = read_inside(path, MANIFEST, MAX_MANIFEST)
        manifest = parse_manifest(raw)
    except FileNotFoundError:
        raise DurableError(
            f"{path} has no {MANIFEST}: it was never committed, or it is no checkpoint of ours"
        ) from None
    except OSError as err:
        raise DurableError(explain(err, "reading a checkpoint's manifest", path)) from None
    except ValueError as err:
        raise DurableError(f"{path / MANIFEST} is no manifest that this reads: {err}") from None
    if step_of(path) not in (None, manifest.step):
        raise DurableError(f"{path / MANIFEST} is of step {manifest.step}")
    return manifest


def doubt(directory: str | Path, step: int, why: str) -> None:
    """Mark a step that could not be read: robust-srun, which reads manifests alone, would choose it
    again and again. It is used only where there is no other."""
    path = step_dir(directory, step)
    with contextlib.suppress(OSError, DurableError):
        attempt = read_manifest(path).attempt
        mark = read_mark(path, attempt)
        if not mark.doubt:
            write_mark(path, attempt, mark._replace(doubt=why))


def read_rank(path: Path, manifest: Manifest, rank: int) -> Part:
    """One rank's part, checked against the manifest. Raises DurableError."""
    return _read_pinned(path, manifest, rank, parse_part)


def read_outlines(path: Path, manifest: Manifest) -> list[Outline]:
    """Read the outlines of all ranks' parts, checked against the manifest. Raises DurableError."""
    known: dict[bytes, Any] = {}
    return [read_outline(path, manifest, rank, known) for rank in range(manifest.world)]


def read_outline(path: Path, manifest: Manifest, rank: int, known: dict[bytes, Any]) -> Outline:
    """Read a rank's part as ``read_rank`` does; ``known``: see ``parse_outline``."""
    return _read_pinned(path, manifest, rank, lambda raw: parse_outline(raw, known))


def _read_pinned(path: Path, of: Manifest, rank: int, parse: Callable[[bytes], P]) -> P:
    if not 0 <= rank < of.world:
        raise DurableError(f"{path} is of {counted(of.world, 'rank')}, it has no rank {rank}")
    pinned = of.parts[rank]
    where = path / pinned.name
    try:
        raw = read_inside(path, pinned.name, min(pinned.size, MAX_PART))
        if len(raw) != pinned.size or digest_of(raw) != pinned.digest:
            raise DurableError(f"{where} differs from what was committed")
        part = parse(raw)
        check_part(part.identity, (of.attempt, of.step, rank, of.world))
    except OSError as err:
        raise DurableError(explain(err, f"reading rank {rank}'s part", where)) from None
    except ValueError as err:
        raise DurableError(f"{where}: {err}") from None
    return part


def check_part(found: Identity, wanted: Identity) -> None:
    """Check a part's identity. Raises ValueError."""
    if found != wanted:
        said = ("{}, step {}, rank {} of {}".format(*each) for each in (found, wanted))
        raise ValueError("it is of attempt {}, not of {}".format(*said))


def encode_manifest(manifest: Manifest) -> bytes:
    return encode({"version": VERSION, "format": "robust-slurm", **manifest._asdict()})


def parse_manifest(raw: bytes) -> Manifest:
    """Parse a manifest. Raises ValueError for anything that this version cannot have written."""
    try:
        data = json.loads(raw)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']}, this reads {VERSION}")
        if not is_attempt(data["attempt"]):
            raise ValueError("attempt")
        size, digest = data["metadata"]
        manifest = Manifest(
            step=count(data["step"]),
            attempt=data["attempt"],
            world=count(data["world"]),
            mesh={text(name): count(n) for name, n in data["mesh"].items()},
            time=float(data["time"]),
            bytes=count(data["bytes"]),
            parts=tuple(_pinned(*part) for part in data["parts"]),
            metadata=(count(size), [count(crc) for crc in digest]),
            renamed=tuple(
                Renamed(text(name), text(fqn), tuple(map(count, ranks)))
                for name, fqn, ranks in data["renamed"]
            ),
        )
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as err:
        raise ValueError(f"{type(err).__name__}: {err}") from None
    _check_ranks(manifest.parts, manifest.world)
    return manifest


def _pinned(rank: Any, name: Any, size: Any, digest: Any) -> PartFile:
    if not is_plain_name(name):
        raise ValueError(f"file name {name!r}")
    return PartFile(count(rank), str(name), count(size), [count(crc) for crc in digest])


def _check_ranks(parts: Sequence[PartFile], world: int) -> None:
    if world < 1 or [part.rank for part in parts] != list(range(world)):
        raise ValueError("not one part for each rank")
