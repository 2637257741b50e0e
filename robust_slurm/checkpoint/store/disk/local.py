"""Snapshots on the node's own disk: they outlive the job's processes, not the node.

``<directory>/<job>/own-<rank>-<step>.safetensors`` and beside it ``.json`` with the digest, which
is renamed into place last: without it there is no snapshot.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from pathlib import Path

from robust_slurm.checkpoint.format import digest
from robust_slurm.checkpoint.store.events import Holding
from robust_slurm.checkpoint.store.shelf import ShelfRecord, open_snapshot
from robust_slurm.checkpoint.transfer.channel import BrokenError
from robust_slurm.checkpoint.transfer.sending import Offer

KEEP = 2
MAX_NOTE = 16 << 20
_NOTE = re.compile(r"own-(0|[1-9]\d{0,8})-(0|[1-9]\d{0,17})\.json")
_PIECE = 16 << 20


class LocalDisk:
    """One job's directory on the disk."""

    def __init__(self, directory: Path, job: str) -> None:
        self.directory = directory / job

    def store(self, fd: int, record: ShelfRecord) -> None:
        """Copy a complete snapshot there. Older ones than the newest two go first, and so do all of
        later steps: training went back, and would keep one of these in place of its own.

        Raises OSError.
        """
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.directory.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(errno.EPERM, f"{self.directory} is not this user's alone")
        stem = f"own-{record.owner}-{record.step}"
        there = self._steps(record.owner)
        older = [step for step in there if step < record.step]
        for step in (*(step for step in there if step > record.step), *older[KEEP - 1 :]):
            self._remove(record.owner, step)
        target = self.directory / f"{stem}.safetensors"
        _write(target, fd, record.size)
        note = Offer.of(record).message("note")
        temporary = self.directory / f".{stem}.json.tmp"
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
            file.write(json.dumps(note))
        temporary.rename(self.directory / f"{stem}.json")

    def _steps(self, owner: int) -> list[int]:
        return sorted((s for o, s in self._names() if o == owner), reverse=True)

    def _names(self) -> list[tuple[int, int]]:
        try:
            names = [path.name for path in self.directory.iterdir()]
        except OSError:
            return []
        matches = (match for name in names if (match := _NOTE.fullmatch(name)))
        return sorted((int(m[1]), int(m[2])) for m in matches)

    def _remove(self, owner: int, step: int) -> None:
        for suffix in ("json", "safetensors"):  # in this order: never a note without its file
            with contextlib.suppress(OSError):
                (self.directory / f"own-{owner}-{step}.{suffix}").unlink()

    def give_up(self, owner: int, first: int, line: tuple[int, int]) -> None:
        """Remove what ``owner`` has from step ``first`` on, and what others have from then on of a
        timeline (epoch, line) before this one: all ranks gave it up."""
        for other, step in self._names():
            if step >= first and (other == owner or self._older(other, step, line)):
                self._remove(other, step)

    def _older(self, owner: int, step: int, line: tuple[int, int]) -> bool:
        try:
            note = self._note(owner, step)
        except (OSError, ValueError):
            return False
        return note.epoch == line[0] and note.line < line[1]

    def path(self, owner: int, step: int) -> Path:
        return self.directory / f"own-{owner}-{step}.safetensors"

    def open(self, owner: int, step: int) -> tuple[int, Offer] | None:
        """Descriptor and description of a snapshot; None if it is not there. Raises OSError."""
        try:
            offer = self._note(owner, step)
        except (OSError, ValueError):
            return None
        fd, size, _ = open_snapshot(self.path(owner, step))
        if size != offer.size:
            os.close(fd)
            return None
        return fd, offer

    def _note(self, owner: int, step: int) -> Offer:
        """Read the note beside the file. Raises OSError, ValueError."""
        path = self.path(owner, step).with_suffix(".json")
        fd, size, _ = open_snapshot(path)
        with open(fd, "rb") as file:
            if size > MAX_NOTE:
                raise ValueError(f"{path} has {size} bytes")
            note = json.loads(file.read(MAX_NOTE))
        try:
            offer = Offer.read(note) if isinstance(note, dict) else None
        except BrokenError:
            offer = None
        if offer is None or (offer.owner, offer.step) != (owner, step):
            raise ValueError(f"{path} is not understood")
        return offer

    def stock(self, threads: int, only: int | None = None) -> list[Holding]:
        """Return all files (or one step's), with digests verified now (not with 0 threads)."""
        names = [name for name in self._names() if only is None or name[1] == only]
        return [self._verify(owner, step, threads) for owner, step in names]

    def _verify(self, owner: int, step: int, threads: int) -> Holding:
        file, why = str(self.path(owner, step)), ""
        note = Offer(owner, step, 0, (owner,), 0, 0, [])
        try:
            note = self._note(owner, step)
            found = self.open(owner, step)
            if found is None:
                why = "its size is not what it was"
            else:
                with open(found[0], "rb", buffering=0) as opened:
                    if threads and (
                        wrong := digest.differing(
                            opened.fileno(), note.size, note.digest, threads=threads
                        )
                    ):
                        why = digest.describe(wrong, note.size)
        except (OSError, ValueError) as err:
            why = f"cannot be read: {err}"
        return Holding(
            owner, step, note.world, note.needs, "local", file, note.size, not why, why,
            note.epoch, note.same, note.line,
        )  # fmt: skip

    def bring(self, owner: int, step: int, target: Path) -> ShelfRecord:
        """Copy a snapshot into the store's directory. ValueError when there is no good one.

        Raises OSError when it cannot be written.
        """
        try:
            found = self.open(owner, step)
        except OSError as err:
            raise ValueError(f"{self.path(owner, step)}: {err.strerror or err}") from None
        if found is None:
            raise ValueError(f"{self.path(owner, step)} is not there, or not complete")
        fd, offer = found
        try:
            _write(target, fd, offer.size, sync=False)
        finally:
            os.close(fd)
        copy, _, inode = open_snapshot(target)
        try:
            wrong = digest.differing(copy, offer.size, offer.digest)
        finally:
            os.close(copy)
        if wrong:
            target.unlink()
            raise ValueError(f"{self.path(owner, step)}: {digest.describe(wrong, offer.size)}")
        return offer.record(target.name, inode)


def _write(target: Path, fd: int, size: int, *, sync: bool = True) -> None:
    """Copy ``size`` bytes of a file to ``target``, which appears only when it is complete."""
    temporary = target.with_name(f".{target.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(temporary, flags, 0o600)
    try:
        os.posix_fallocate(out, 0, size)
        at = 0
        while at < size:
            sent = os.sendfile(out, fd, at, min(_PIECE, size - at))
            if not sent:
                raise digest.FileChangedError(f"the file ends at byte {at} of {size}")
            at += sent
        if sync:
            os.fsync(out)
        temporary.rename(target)
    except BaseException:
        temporary.unlink()
        raise
    finally:
        os.close(out)
