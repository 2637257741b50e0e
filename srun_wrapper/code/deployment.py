"""A job's code at its start: the version in force, and what ranks become with a version."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping as Map
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from robust_slurm.state_dir.files import read_capped
from robust_slurm.state_dir.ledger import replace_file
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.mapping import Mapping
from srun_wrapper.code.snapshot import Asked, read_manifest, take
from srun_wrapper.code.versions import Book, Change
from srun_wrapper.protocol.code import Code

BOOK = "code.json"
REQUESTS = "updates.jsonl"
_MOST = 4 << 20  # bytes of the book


@dataclass
class Deployment:
    """Holds the book of a job's code, and the command as the user gave it.

    ``old``: the working directory that ranks would have without a snapshot.
    """

    book: Book
    records: Path
    old: str
    words: tuple[str, ...]
    python_path: str
    first: Code | None = None  # what the ranks start with

    def code(self, version: str) -> Code:
        """Return what a rank's start becomes with this version. Raises CodeError.

        It looks at the snapshot, which is on a shared file system.
        """
        source, store = self.book.source, self.book.store
        tree = f"{store}/{version}"
        manifest = read_manifest(Path(store), version)
        if manifest is None or not Path(tree).is_dir():
            raise CodeError(f"version {version} is not in {store} any more")
        live = set(manifest.live)

        def has(inside: str) -> bool:
            parts = inside.split("/")
            linked = any("/".join(parts[:n]) in live for n in range(1, len(parts) + 1))
            return not linked and _exists(f"{tree}/{inside}")

        mapping = Mapping(source, tree, self.old, has, _exists, _real)
        path = mapping.python_path(self.python_path)
        environ = {"PYTHONPATH": path} if path != self.python_path else {}
        code = Code(
            version, source, store, tree, mapping.directory(), mapping.command(self.words), environ
        )
        if not code.directory and not environ and code.command == self.words:
            raise CodeError(
                f"no part of the command, the working directory ({self.old}) or PYTHONPATH is in "
                f"{source}: the ranks would not run the snapshot; give the directory of the "
                "program, or start robust-srun in it"
            )
        if self.first is not None and (lost := missing(self.first, code, self.words, self.old)):
            raise CodeError(f"version {version} has no {lost}, where the job's ranks run")
        return code


def missing(first: Code, code: Code, words: Sequence[str], old: str) -> str:
    """Return what the ranks had from the first version and would not have from ``code``. Pure.

    They would take it from the live directory.
    """
    if first.directory and not code.directory:
        return old
    each = zip(words, first.command, code.command, strict=True)
    return next((word for word, was, now in each if was != word and now == word), "")


def deploy(
    asked: Asked,
    records: Path,
    who: tuple[str, str],
    old: str,
    words: Sequence[str],
    env: Map[str, str],
    *,
    restarts: bool,
) -> tuple[Deployment, str]:
    """Return the job's code and one line about it. Raises CodeError, OSError.

    A job that runs again, after a requeue or in its next step, goes on with its version in force.
    ``who``: user and host.
    """
    book = read_book(records / BOOK)
    line, now = "", time.time()
    if book is None or book.source != asked.source or not _there(book, book.current):
        version, line = take(asked)
        versions = book.versions if book is not None else []
        book = Book(
            asked.source,
            asked.store,
            asked.exclude,
            asked.limit,
            restarts=restarts,
            versions=versions,
        )
        book.add(version)
        start = Change(f"start-{int(now)}", "start", version.id, *who, "", now)
        book.changes.append(start)
        book.apply(start, now)
        book.read = _size(records / REQUESTS)
    else:
        change = book.waiting()
        if change is not None and _there(book, change.version):
            book.apply(change, now)
        elif change is not None:
            change.state, change.outcome = "refused", f"it is not in {book.store} any more"
        line = f"code {book.current}: the version in force in this job; {book.source} is not read"
    book.running, book.cluster = True, env.get("SLURM_CLUSTER_NAME", "")
    deployment = Deployment(book, records, old, tuple(words), env.get("PYTHONPATH", ""))
    deployment.first = deployment.code(book.current)
    _make_requests(records / REQUESTS)
    replace_file(records / BOOK, msgspec.to_builtins(book))
    return deployment, line


def read_book(path: Path) -> Book | None:
    """Read a job's book; None if there is none, or none that can be read."""
    try:
        return msgspec.json.decode(read_capped(path, _MOST), type=Book)
    except (OSError, ValueError, RecursionError):  # no UTF-8, or nested too deep
        return None


def _there(book: Book, version: str) -> bool:
    store = Path(book.store)
    return (
        bool(version) and (store / version).is_dir() and read_manifest(store, version) is not None
    )


def _make_requests(path: Path) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o600))


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _exists(path: str) -> bool:
    return "\0" not in path and os.path.lexists(path)


def _real(path: str) -> str:
    """Resolve the links of a path's folder, not the last name: a link is a file of its own."""
    folder, _, name = path.rpartition("/")
    return path if "\0" in path else f"{os.path.realpath(folder)}/{name}"
