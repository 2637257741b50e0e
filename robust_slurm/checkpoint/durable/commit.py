"""Commit a step of the durable tier, once every rank has written its part.

The order makes a kill at any point safe: the data and the parts are on the disk already; then
``.metadata`` (for others) is replaced, and last of all ``manifest.json`` (for us), each by one
rename. An older committed step is only removed after that.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from . import tier
from .dcp.metadata import TooManyBlocks, build, write_metadata
from .files import (
    NEWER,
    DurableError,
    digest_inside,
    digest_of,
    explain,
    read_inside,
    size_inside,
    sync_directory,
    write_whole,
)
from .merge import Merged, merge
from .parts import MAX_PART, Outline, parse_outline, part_name
from .prune import prune

_READERS = 16
_publishing = threading.Lock()
_seen: dict[Path, set[tuple[int, str]]] = {}  # by directory: steps and attempts there last time
_EPOCH = re.compile(r"(.*)\.e(\d{1,15})(?:-(\d{1,18}))?")


class CommitResult(NamedTuple):
    """Result of a commit."""

    step: int
    bytes: int
    removed: list[str]
    """Names of older steps that went."""
    notes: list[str]
    """For the user, one line each."""


class CommitRequest(NamedTuple):
    """A commit that was asked for."""

    directory: Path
    step: int
    world: int
    attempt: str
    wait: float
    """Seconds to wait for the ranks' parts."""
    keep: int
    """Committed steps that stay."""


def commit(request: CommitRequest, stop: threading.Event) -> CommitResult:
    """Wait for all parts, then commit. Raises DurableError; then nothing has changed for readers.

    Setting ``stop`` ends the wait.
    """
    where = tier.step_dir(request.directory, request.step)
    doing = f"committing step {request.step}"
    try:
        parts, pinned = _gather(request, where, stop)
        notes: list[str] = []
        with _publishing:  # a flush may ask for the step whose commit is under way
            if not _is_done(request, where, pinned):
                merged = _merged(request, parts, where)
                notes = _publish(request, where, parts, pinned, merged)
    except FileNotFoundError as err:
        if _newer(request):  # whose commit has removed this step
            raise DurableError(NEWER) from None
        raise DurableError(explain(err, doing, where)) from None
    except OSError as err:
        raise DurableError(explain(err, doing, where)) from None
    try:
        notes += _other_runs(request)
        removed = prune(request.directory, request.keep, request.step)
    except DurableError as err:  # the step is safe; the next commit tries again
        removed, notes = [], [*notes, str(err)]
    return CommitResult(request.step, sum(part.bytes for part in parts), removed, notes)


def _other_runs(request: CommitRequest) -> list[str]:
    """A line if another run commits into the same directory meanwhile; no clock is compared.

    Raises DurableError.
    """
    there = {(each.step, each.attempt) for each in tier.committed(request.directory)}
    new = {attempt for _, attempt in there - _seen.setdefault(request.directory, there)}
    _seen[request.directory] = there
    others = sorted({_run_of(attempt) for attempt in new} - {_run_of(request.attempt)})
    if not others:
        return []
    return [
        f"another run ({', '.join(others)}) commits checkpoints to {request.directory} as well: "
        "each resumes from the other's newest step and removes the other's older ones. Give each "
        "run its own directory"
    ]


def _run_of(attempt: str) -> str:
    match = _EPOCH.fullmatch(attempt)
    return match[1] if match else attempt


def _gather(
    request: CommitRequest, where: Path, stop: threading.Event
) -> tuple[list[Outline], list[tier.PartFile]]:
    """Collect all ranks' parts. Raises DurableError when one does not appear in time.

    A shared file system sends no notifications, so the directory is listed again and again: the
    more ranks there are, the less often.
    """
    deadline = time.monotonic() + request.wait
    poll = min(2.0, max(0.2, 0.2 * request.world / 256))
    found: dict[int, tuple[Outline, tier.PartFile]] = {}
    awaited = {part_name(request.attempt, rank): rank for rank in range(request.world)}
    reader = _PartReader(request, where)
    while True:
        present = [awaited[name] for name in _present(request, where, awaited)]
        for came in reader.read(present):
            found[came[0].rank] = came
            del awaited[came[1].name]
        if not awaited:
            break
        if stop.is_set() or time.monotonic() > deadline:
            why = "given up" if stop.is_set() else f"{request.wait:g} s have passed"
            missing = list(awaited.values())
            said = ", ".join(map(str, missing[:16])) + (", ..." if missing[16:] else "")
            raise DurableError(
                f"step {request.step} is not committed: no part of rank {said} in {where} "
                f"({why}); the older checkpoints stay"
            )
        stop.wait(poll)
    ordered = [found[rank] for rank in range(request.world)]
    return [part for part, _ in ordered], [pin for _, pin in ordered]


def _present(request: CommitRequest, where: Path, names: Container[str]) -> list[str]:
    """Return the existing ``names``. FileNotFoundError: a newer step has removed them."""
    try:
        with os.scandir(where) as entries:
            return [entry.name for entry in entries if entry.name in names]
    except FileNotFoundError:
        if not request.directory.is_dir():
            raise DurableError(
                f"committing step {request.step}: {request.directory} is gone; is the file system "
                "still mounted?"
            ) from None
        if _newer(request):
            raise
        return []


def _newer(request: CommitRequest) -> bool:
    """True if a newer step is committed. Raises DurableError."""
    return any(
        step > request.step and tier.is_committed(path)
        for step, path in tier.step_dirs(request.directory)
    )


class _PartReader:
    """Reads ranks' parts: many at once, for each costs the file system some round trips."""

    def __init__(self, request: CommitRequest, where: Path) -> None:
        self._request, self._where = request, where
        self._known: dict[bytes, Any] = {}
        self._lock = threading.Lock()

    def read(self, ranks: Sequence[int]) -> list[tuple[Outline, tier.PartFile]]:
        """Read the parts that (still) exist. Raises DurableError, OSError."""
        with ThreadPoolExecutor(min(_READERS, len(ranks) or 1)) as pool:
            return [came for came in pool.map(self._part, ranks) if came is not None]

    def _part(self, rank: int) -> tuple[Outline, tier.PartFile] | None:
        request, where = self._request, self._where
        name = part_name(request.attempt, rank)
        try:
            raw = read_inside(where, name, MAX_PART)
        except FileNotFoundError:
            return None
        try:
            with self._lock:
                part = parse_outline(raw, self._known)
            wanted = request.attempt, request.step, rank, request.world
            tier.check_part(part.identity, wanted)
        except ValueError as err:
            raise DurableError(
                f"step {request.step} is not committed: {where / name}: {err}"
            ) from None
        for file in part.files:
            size = size_inside(where, file.name)
            if size != file.size:
                raise DurableError(
                    f"step {request.step} is not committed: {where / file.name} has {size} bytes, "
                    f"rank {rank} wrote {file.size}"
                )
        return part, tier.PartFile(rank, name, len(raw), digest_of(raw))


def _is_done(request: CommitRequest, where: Path, pinned: list[tier.PartFile]) -> bool:
    """True if this very attempt is committed already. Raises DurableError if a later one is."""
    try:
        there = tier.read_manifest(where)
    except DurableError:
        return False
    if there.attempt == request.attempt:
        return list(there.parts) == pinned
    ours, theirs = _EPOCH.fullmatch(request.attempt), _EPOCH.fullmatch(there.attempt)
    if ours and theirs and ours[1] == theirs[1] and _order(ours) < _order(theirs):
        raise DurableError(
            f"step {request.step} is not committed for {request.attempt}: {there.attempt}, which "
            "came later, has committed it"
        )
    return False


def _order(attempt: re.Match[str]) -> tuple[int, int]:
    return int(attempt[2]), int(attempt[3] or 0)  # epoch, timeline within it


def _merged(request: CommitRequest, parts: list[Outline], where: Path) -> Merged:
    merged = merge(parts)
    mark = tier.apart_mark(request.directory, request.attempt)
    if merged.apart:
        mark.touch()
    else:
        mark.unlink(missing_ok=True)
    if merged.problems:
        more = f" (and {len(merged.problems) - 1} more)" if len(merged.problems) > 1 else ""
        raise DurableError(f"{where} is not committed: {merged.problems[0]}{more}")
    return merged


def _publish(
    request: CommitRequest,
    where: Path,
    parts: list[Outline],
    pinned: list[tier.PartFile],
    merged: Merged,
) -> list[str]:
    """Write ``.metadata``, then the manifest, whose rename commits. Returns notes.

    Raises OSError, and DurableError if the parts do not fit together.
    """
    scratch = where / f"{tier.METADATA}-{request.attempt}"
    notes, built = [], None
    size, digest = 0, list[int]()
    about = StorageMeta(checkpoint_id=str(where), save_id=request.attempt)
    try:
        built = build(merged, parts)
        size, digest = _write_metadata(scratch, about, *built)
    except TooManyBlocks as err:
        notes.append(f"step {request.step} has no {tier.METADATA}: {err}")
    except ValueError as err:
        raise DurableError(f"{where} is not committed: {err}") from None
    manifest = tier.Manifest(
        step=request.step,
        attempt=request.attempt,
        world=request.world,
        mesh=parts[0].mesh,
        time=time.time(),
        bytes=sum(part.bytes for part in parts),
        parts=tuple(pinned),
        metadata=(size, digest),
        renamed=tuple(
            tier.Renamed(t.name, t.fqn, tuple(t.ranks))
            for t in merged.tensors
            if t.name != t.fqn and t.kind != "private"
        ),
    )
    # This copy of the manifest stays. It shows that a .metadata which is not the manifest's is not
    # damaged: this commit was cut off, or another attempt's came between.
    ready = where / (request.attempt + tier.COMMIT_SUFFIX)
    raw = tier.encode_manifest(manifest)
    write_whole(ready, raw)
    if built is not None:
        (scratch / tier.METADATA).replace(where / tier.METADATA)
    sync_directory(where)
    write_whole(where / tier.MANIFEST, raw, tmp=ready.with_name(ready.name + ".tmp"))
    if built is not None and _overtaken(where, manifest):
        _write_metadata(scratch, about, *built)
        (scratch / tier.METADATA).replace(where / tier.METADATA)
        sync_directory(where)
    try:
        scratch.rmdir()
    except OSError:
        pass
    return notes


def _write_metadata(
    scratch: Path, about: StorageMeta, metadata: Metadata, results: list[WriteResult]
) -> tuple[int, list[int]]:
    """Write DCP's metadata into the directory ``scratch``. Returns its size and digest."""
    scratch.mkdir(exist_ok=True)
    write_metadata(scratch, about, metadata, results)
    return digest_inside(scratch, tier.METADATA)


def _overtaken(where: Path, manifest: tier.Manifest) -> bool:
    """True if another attempt's commit put its .metadata between our two renames."""
    try:
        if tier.read_manifest(where) != manifest:
            return False  # the other attempt has replaced the manifest too: its .metadata stays
        return digest_inside(where, tier.METADATA) != manifest.metadata
    except (OSError, DurableError):
        return False
