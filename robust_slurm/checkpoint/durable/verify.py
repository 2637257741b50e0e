"""Read every byte of a durable checkpoint and compare it with what was committed.

Standard library only; nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ..format import digest
from . import tier
from .files import DurableError, digest_inside, explain, read_inside
from .merge import merge
from .parts import File, Outline

_THREADS = 4  # reading and summing release the interpreter's lock; more do not help one disk
_TRIES = 3
Read = Callable[[int], None]  # gets the bytes that were read since the last call


class Problem(NamedTuple):
    """A reason why a checkpoint cannot be used."""

    file: str
    """Name in the step's directory, or ""."""
    what: str


def verify(path: Path, read: Read | None = None) -> list[Problem]:
    """Return the faults of the committed step in ``path``; [] if it is good.

    Reads all data; ``read`` is called with the bytes of each file once it was read. A step that is
    replaced by another attempt meanwhile is read again. Raises
    DurableError when there is no committed step (any more).
    """
    for _ in range(_TRIES):
        manifest = tier.read_manifest(path)
        problems = _verify(path, manifest, read)
        if not problems or tier.read_manifest(path) == manifest:
            return problems
    return problems


def verify_files(path: Path, files: Collection[File], read: Read | None = None) -> list[Problem]:
    """Return the faults of these data files."""

    def check(file: File) -> list[Problem]:
        found = _check(path, file.name, file.size, file.digest)
        if read is not None:
            read(file.size)
        return found

    with ThreadPoolExecutor(_THREADS) as pool:
        return [problem for found in pool.map(check, files) for problem in found]


def _verify(path: Path, manifest: tier.Manifest, read: Read | None) -> list[Problem]:
    problems: list[Problem] = []
    parts: list[Outline] = []
    known: dict[bytes, Any] = {}
    for rank, pinned in enumerate(manifest.parts):
        try:
            parts.append(tier.read_outline(path, manifest, rank, known))
        except DurableError as err:
            problems.append(Problem(pinned.name, str(err)))
    problems += verify_files(path, [file for part in parts for file in part.files], read)
    problems += _metadata(path, manifest)
    if len(parts) == manifest.world:
        problems += [Problem("", what) for what in merge(parts).problems]
    return problems


def _metadata(path: Path, manifest: tier.Manifest) -> list[Problem]:
    """Check ``.metadata``: it is the manifest's, or that of another attempt that replaced it.

    Such an attempt was complete before it replaced anything, and its data stays as long as the step
    does, so others load a good checkpoint of the same step. A checkpoint of very many blocks has no
    ``.metadata``.
    """
    if not manifest.metadata[0]:
        return []
    found = _check(path, tier.METADATA, *manifest.metadata)
    if not found:
        return []
    for name in sorted(entry.name for entry in path.glob("*" + tier.COMMIT_SUFFIX)):
        try:
            other = tier.parse_manifest(read_inside(path, name, tier.MAX_MANIFEST))
        except (OSError, ValueError, DurableError):
            continue
        if not _check(path, tier.METADATA, *other.metadata):
            return []
    return found


def _check(path: Path, name: str, size: int, expected: list[int]) -> list[Problem]:
    try:
        now, found = digest_inside(path, name)
    except digest.FileChangedError as err:
        return [Problem(name, f"{path / name}: {err}")]
    except OSError as err:
        return [Problem(name, explain(err, "reading", path / name))]
    if now != size:
        return [Problem(name, f"{path / name} has {now} bytes, {size} were committed")]
    bad = [i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b]
    if bad or len(found) != len(expected):
        return [Problem(name, f"{path / name}: {digest.describe(bad or [0], size)}")]
    return []
