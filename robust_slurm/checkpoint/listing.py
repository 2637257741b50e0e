"""Contents of a directory for ``robust-ckpt``, as plain data. Standard library only."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from robust_slurm.text import ago

from .durable import marks, tier
from .durable.files import DurableError, explain
from .durable.parts import MAX_PART
from .durable.verify import Problem, verify
from .format import digest
from .format.layout import SUFFIX, LayoutError, Snapshot, read_snapshot

COMMITTED, OPEN, DAMAGED = "committed", "not committed", "damaged"
COMPLETE, TORN = "complete", "being written"
_SNAPSHOT = re.compile(r"(own|replica|fetched)-\d+-\d+\.safetensors")
_PART = re.compile(r".+-rank-(\d+)\.json")


class ListingError(Exception):
    """Raised for input that cannot be examined."""


class StepRow(NamedTuple):
    """One step of the durable tier."""

    path: str
    step: int
    state: str
    time: float | None = None
    """Time of the commit, seconds since 1970."""
    world: int | None = None
    mesh: dict[str, int] = {}  # noqa: RUF012 - a default
    bytes: int = 0
    attempt: str = ""
    note: str = ""
    mark: str = ""
    """The proofs that certify it; ``doubted``: a recovery passed over it."""


class FileRow(NamedTuple):
    """One snapshot file."""

    path: str
    state: str
    bytes: int
    step: int | None = None
    rank: int | None = None
    world: int | None = None
    epoch: int | None = None
    job: str = ""
    note: str = ""


class Listing(NamedTuple):
    """All there is in a directory."""

    directory: str
    steps: list[StepRow]
    files: list[FileRow]

    @property
    def bad(self) -> bool:
        states = [row.state for row in self.steps] + [row.state for row in self.files]
        return DAMAGED in states


class Checked(NamedTuple):
    """One step or file that was verified."""

    path: str
    kind: str
    """``step`` or ``file``."""
    good: bool
    bytes: int
    seconds: float
    problems: list[Problem]
    note: str
    """Remark on files that were not checked."""


def read_listing(path: Path) -> Listing:
    """List a directory of steps or of snapshot files, or one step. Raises ListingError."""
    if not path.is_dir():
        raise ListingError(f"{path} is not a directory")
    if tier.step_of(path.resolve()) is not None:
        return Listing(str(path), [_step_row(path)], [])
    try:
        steps = [_step_row(where) for _, where in tier.step_dirs(path)]
        names = sorted(p.name for p in path.iterdir() if _SNAPSHOT.fullmatch(p.name))
    except DurableError as err:
        raise ListingError(str(err)) from None
    except OSError as err:
        raise ListingError(explain(err, "listing", path)) from None
    return Listing(str(path), steps, [_file_row(path / name) for name in names])


def _step_row(path: Path) -> StepRow:
    step = tier.step_of(path.resolve()) or 0
    if not tier.is_committed(path):
        return _open_row(path, step)
    try:
        m = tier.read_manifest(path)
    except DurableError as err:
        return StepRow(str(path), step, DAMAGED, note=str(err))
    mark = marks.read(path, m.attempt)
    notes = [mark.doubt] if mark.doubt else []
    notes += [f"{len(m.renamed)} names stand for more than one tensor"] if m.renamed else []
    return StepRow(
        str(path), m.step, COMMITTED, m.time, m.world, m.mesh, m.bytes, m.attempt,
        "; ".join(notes), str(mark),
    )  # fmt: skip


def _open_row(path: Path, step: int) -> StepRow:
    size, ranks, newest = 0, 0, None
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                size += about.st_size
                ranks += _PART.fullmatch(entry.name) is not None
                newest = max(about.st_mtime, newest or 0.0)
    except OSError as err:
        return StepRow(str(path), step, DAMAGED, note=explain(err, "listing", path))
    note = f"{ranks} {'rank has' if ranks == 1 else 'ranks have'} written"
    if newest is not None:
        note += f", last written {ago(newest, time.time())}"
    return StepRow(str(path), step, OPEN, bytes=size, note=note)


def _file_row(path: Path) -> FileRow:
    size = 0
    try:
        size = path.lstat().st_size
        s = _snapshot(path)
    except (LayoutError, OSError, ListingError) as err:
        if str(err).startswith("torn"):
            return FileRow(str(path), TORN, size)
        return FileRow(str(path), DAMAGED, size, note=str(err))
    return FileRow(str(path), COMPLETE, size, s.step, s.rank, s.world, s.epoch, s.job)


def _snapshot(path: Path) -> Snapshot:
    if path.is_symlink() or not path.is_file():
        raise ListingError(f"{path} is not a regular file")
    return read_snapshot(str(path))[0]


def size(path: Path) -> int:
    """Return the bytes that ``check`` reads, as far as they can be known now; 0: none."""
    if path.is_file():
        return path.stat().st_size
    found = read_listing(path)
    return sum(row.bytes for row in found.steps) + sum(row.bytes for row in found.files)


def check(path: Path, read: Callable[[int], None] | None = None) -> list[Checked]:
    """Verify one step, one snapshot file, or all there is in a directory. Raises ListingError.

    ``read`` is called with the number of bytes of each file that was read.
    """
    if path.is_file():
        return [_check_file(path)]
    found = read_listing(path)
    one = tier.step_of(path.resolve()) is not None
    results = []
    for row in found.steps:
        if row.state != OPEN or one:
            results.append(_check_step(Path(row.path), read))
    for each in found.files:
        if each.state != TORN:
            results.append(_check_file(Path(each.path)))
            if read is not None:
                read(each.bytes)
    return results


def _check_step(path: Path, read: Callable[[int], None] | None) -> Checked:
    started = time.monotonic()
    size = 0
    try:
        size = tier.read_manifest(path).bytes
        problems = verify(path, read)
    except DurableError as err:
        problems = [Problem(tier.MANIFEST, str(err))]
    return _checked(path, "step", problems, size, started)


def _check_file(path: Path) -> Checked:
    started = time.monotonic()
    size, note = 0, ""
    problems: list[Problem] = []
    try:
        size = path.stat().st_size
        read_snapshot(str(path))
        expected = _digest_beside(path)
        if expected is None:
            note = "the data was not checked: there is no digest beside the file"
        else:
            problems = _compare(path, size, expected)
    except (LayoutError, OSError, ValueError) as err:
        problems = [Problem(path.name, f"{path}: {err}")]
    return _checked(path, "file", problems, size, started, note)


def _compare(path: Path, size: int, expected: Sequence[int]) -> list[Problem]:
    with open(path, "rb", buffering=0) as file:
        bad = digest.differing(file.fileno(), size, expected)
    return [Problem(path.name, f"{path}: {digest.describe(bad, size)}")] if bad else []


def _digest_beside(path: Path) -> list[int] | None:
    """The digest that was kept with a copy on a node's own disk. Raises OSError, ValueError."""
    note = path.with_suffix(".json")
    if path.suffix != SUFFIX or note.is_symlink() or not note.is_file():
        return None
    with open(note, "rb") as file:
        data: Any = json.loads(file.read(MAX_PART))
    found = data.get("digest") if isinstance(data, dict) else None
    if not isinstance(found, list) or not all(type(crc) is int for crc in found):
        raise ValueError(f"{note.name} beside it has no digest")
    return found


def _checked(
    path: Path, kind: str, problems: list[Problem], size: int, started: float, note: str = ""
) -> Checked:
    return Checked(
        str(path), kind, not problems, size, round(time.monotonic() - started, 3), problems, note
    )
