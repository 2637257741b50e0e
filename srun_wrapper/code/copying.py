"""Copies the files of a snapshot: in parallel, hashed, never half of an edit.

A file that has not changed since an earlier snapshot of the same job is a hard link to its copy
there: snapshots are read-only, so they may share files with each other, never with the user's.
"""

from __future__ import annotations

import hashlib
import os
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from srun_wrapper.code.listing import CodeError

WORKERS = 16  # files at once: a shared file system answers each of them slowly
TRIES = 4  # for a file that changes while it is read
RACY = 2 * 10**9  # ns; a change this soon before a look may not show in the times of the file
_CHUNK = 1 << 20
Stamp = tuple[int, int, int, int]  # size, mtime and ctime in ns, inode


class CopiedFile(msgspec.Struct, array_like=True, frozen=True):
    """A file or link of a snapshot, and what its source looked like."""

    kind: str  # "f" or "l"
    mode: int
    digest: str  # of the content; of a link: its target
    stamp: Stamp
    seen: int  # ns, our wall clock when it was read; 0 for a link
    size: int = 0


class SnapshotManifest(msgspec.Struct):
    """All entries of a snapshot by their path, and the paths that are links to what is live."""

    entries: dict[str, CopiedFile]
    live: list[str] = []


@dataclass
class FileCopier:
    """Copies from ``source`` to ``tree``; ``earlier``: an earlier tree and its manifest."""

    source: str
    tree: str
    earlier: tuple[str, SnapshotManifest] | None = None
    entries: dict[str, CopiedFile] = field(default_factory=dict)
    linked: int = 0
    skipped: list[str] = field(default_factory=list)  # sockets, pipes, devices

    def copy(self, paths: Iterable[str]) -> None:
        """Copy these files. Raises CodeError."""
        names = sorted(paths)
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            Path(self.tree, folder).mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(WORKERS) as pool:
            for name, entry in zip(names, pool.map(self._one, names), strict=True):
                if entry is not None:
                    self.entries[name] = entry

    def changed(self, paths: Iterable[str]) -> set[str]:
        """Return the files that have changed since they were copied, are new, or are gone."""
        now = set(paths)
        gone = self.entries.keys() - now
        known = now & self.entries.keys()
        with ThreadPoolExecutor(WORKERS) as pool:
            same = pool.map(lambda name: self._stamp(name) == self.entries[name].stamp, known)
            moved = {name for name, equal in zip(known, same, strict=True) if not equal}
        return gone | moved | {n for n in now - known if n not in self.skipped and self._stamp(n)}

    def forget(self, paths: Iterable[str]) -> None:
        """Remove the copies of these files."""
        for name in paths:
            self.entries.pop(name, None)
            Path(self.tree, name).unlink(missing_ok=True)

    def _stamp(self, name: str) -> Stamp | None:
        try:
            return stamp_of(os.lstat(f"{self.source}/{name}"))
        except OSError:
            return None

    def _one(self, name: str) -> CopiedFile | None:
        """Copy one file; None if it is gone, or is a socket, pipe or device."""
        path, target = f"{self.source}/{name}", f"{self.tree}/{name}"
        try:
            for _ in range(TRIES):
                info = os.lstat(path)
                if stat.S_ISLNK(info.st_mode):
                    return self._link(name, path, target, info)
                if not stat.S_ISREG(info.st_mode):
                    self.skipped.append(name)
                    return None
                entry = self._same(name, info, target) or self._copied(path, target, info)
                if entry is not None:
                    return entry
        except (FileNotFoundError, NotADirectoryError):
            return None  # the user has removed it just now; ``changed`` will see
        except OSError as err:
            raise CodeError(f"cannot copy {path}: {err.strerror or err}") from None
        raise CodeError(f"{path} changes all the time; add it to .gitignore or to code_exclude")

    def _link(self, name: str, path: str, target: str, info: os.stat_result) -> CopiedFile:
        to = str(Path(path).readlink())
        moved = retarget(name, to, self.source)
        Path(target).symlink_to(moved)
        return CopiedFile(
            "l", 0o777, _sha(moved.encode(errors="surrogateescape")), stamp_of(info), 0
        )

    def _same(self, name: str, info: os.stat_result, target: str) -> CopiedFile | None:
        """Link to the copy in the earlier snapshot, if the file is the same."""
        if self.earlier is None:
            return None
        tree, manifest = self.earlier
        entry = manifest.entries.get(name)
        same = (
            entry is not None
            and entry.kind == "f"
            and entry.stamp == stamp_of(info)
            and entry.mode == _mode(info)
            and max(info.st_mtime_ns, info.st_ctime_ns) < entry.seen - RACY
        )
        if not same:
            return None
        try:
            os.link(f"{tree}/{name}", target, follow_symlinks=False)
        except OSError:
            return None  # another file system, or too many links
        self.linked += 1
        return entry

    def _copied(self, path: str, target: str, info: os.stat_result) -> CopiedFile | None:
        """Copy it; None if it changed meanwhile."""
        before = stamp_of(info)
        digest, seen = hashlib.sha256(), time.time_ns()
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            if stamp_of(os.fstat(source)) != before:
                return None
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            copy = os.open(target, flags, 0o600)
            try:
                while data := os.read(source, _CHUNK):
                    digest.update(data)
                    _write(copy, data)
                os.utime(copy, ns=(info.st_atime_ns, info.st_mtime_ns))
                os.fchmod(copy, _mode(info))
            finally:
                os.close(copy)
            after = stamp_of(os.fstat(source))
        finally:
            os.close(source)
        if after != before or stamp_of(os.lstat(path)) != before:
            Path(target).unlink()
            return None
        return CopiedFile("f", _mode(info), digest.hexdigest(), before, seen, info.st_size)


def stamp_of(info: os.stat_result) -> Stamp:
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def digest_of(entries: Mapping[str, CopiedFile]) -> str:
    """Return one digest of all names, modes and contents. Pure."""
    lines = (f"{n}\0{e.kind}\0{e.mode:o}\0{e.digest}\n" for n, e in sorted(entries.items()))
    return _sha("".join(lines).encode(errors="surrogateescape"))


def retarget(name: str, to: str, source: str) -> str:
    """Return the target that a link has in the snapshot. Pure.

    Inside the source it is relative, so that it leads into the snapshot; what leads out of it is
    absolute, because the snapshot is elsewhere.
    """
    folder = os.path.dirname(name)  # noqa: PTH120 - not a path yet
    full = os.path.normpath(os.path.join(source, folder, to))  # noqa: PTH118
    if full == source or full.startswith(source + "/"):
        return os.path.relpath(full, os.path.join(source, folder))  # noqa: PTH118
    return full


def _mode(info: os.stat_result) -> int:
    """Return the mode without any right to write."""
    return (stat.S_IMODE(info.st_mode) & 0o555) | 0o400


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
