"""Prepare memory for snapshots that this node may receive: files whose pages are allocated.

New pages cost the receiver more than the network does: the kernel clears each page, and each mapped
page costs a fault. A node that waits without ranks has the time to do both in advance. Room files
are torn, like all files that are being written, and have no record: no process takes one for a
snapshot.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
from pathlib import Path
from typing import NamedTuple

from robust_slurm.auto.headroom import headroom
from robust_slurm.checkpoint.format.advice import populate
from robust_slurm.checkpoint.format.layout import SUFFIX

SNAPSHOTS = 7  # of one rank, for which a node has room: own, replicas, one being written to disk
_PIECE = 16 << 20  # bytes prepared at once; a caller that needs the room waits for one piece
_NICE = 19
_PATIENCE = 2.0  # s for one piece
_MAPPED = 64  # files: each costs a descriptor of robust-task, and there may be one for each rank


def free(directory: str) -> int:
    """Return the bytes that find room there: in the file system, the machine and all cgroups."""
    about = os.statvfs(directory)
    return min(about.f_bavail * about.f_frsize, headroom())


class Room(NamedTuple):
    """One file that is ready."""

    size: int
    """Bytes that are allocated; fewer than requested if the preparation was stopped."""
    inode: int
    mapped: mmap.mmap | None
    """A mapping of all of them, with its pages in place; None if that was not possible."""

    def is_whole(self, fd: int, size: int) -> bool:
        """True if the open file is still this one, with all pages of its first ``size`` bytes."""
        about = os.fstat(fd)
        there = min(about.st_size, about.st_blocks * 512)
        return about.st_ino == self.inode and min(there, self.size) >= size

    def close(self) -> None:
        """Let go of the mapping."""
        if self.mapped is not None:
            self.mapped.close()


class Reserve:
    """The room files of one store; all methods may be called from any thread."""

    def __init__(self, directory: Path, name: str) -> None:
        """``name``: the store's, for several may share the directory."""
        self._directory = directory
        self._prefix = f".room-{name}-"
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._files: dict[Path, Room] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()  # of this thread
        self._closed = False
        for left in directory.glob(f"{self._prefix}*"):  # by one that was killed
            _remove(left)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each file that is ready."""
        with self._lock:
            return sorted(room.size for room in self._files.values())

    def prepare(self, size: int, files: int) -> None:
        """Make ``files`` files of ``size`` bytes in the background, as far as there is room.

        A second call does nothing until ``clear``.
        """
        with self._lock:
            if self._closed or self._thread is not None:
                return
            self._stop = threading.Event()
            self._thread = threading.Thread(
                target=self._work, args=(size, files, self._stop), name="ckpt-room", daemon=True
            )
            self._thread.start()

    def take(self, size: int, path: Path) -> Room | None:
        """Move a prepared file to ``path``, for ``size`` bytes. None if there is none.

        It is the smallest that is large enough, else the largest, which lacks the least. This stops
        the preparation. The mapping is the caller's.
        """
        self._settle()
        with self._lock:
            sizes = {file: room.size for file, room in self._files.items()}
            for file in sorted(sizes, key=lambda f: (sizes[f] < size, abs(sizes[f] - size))):
                room = self._files.pop(file)
                with contextlib.suppress(OSError):  # somebody has removed it
                    file.rename(path)
                    return room
        return None

    def clear(self) -> None:
        """Stop the preparation and remove all files."""
        with self._lock:
            self._stop.set()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(_PATIENCE)
        with self._lock:
            files, self._files = self._files, {}
        for path, room in files.items():
            room.close()
            _remove(path)

    def close(self) -> None:
        """Stop the preparation for good and remove all files."""
        with self._lock:
            self._closed = True
        self.clear()

    def _settle(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join(_PATIENCE)

    def _work(self, size: int, files: int, stop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # of this thread
        for number in range(files):
            path = self._directory / f"{self._prefix}{next(self._numbers)}{SUFFIX}"
            # Room for what the ranks will save is worth more than room for what they start from.
            left = max(SNAPSHOTS, files) * size
            if stop.is_set() or free(str(self._directory)) < left:
                return
            try:
                made: Room | None = _make(path, size, stop, mapped=number < _MAPPED)
            except OSError:  # full: then there is less
                made = None
            if made is None:
                _remove(path)
                return
            with self._lock:
                mine = self._thread is threading.current_thread()
                if mine:
                    self._files[path] = made
            if not mine:  # given up meanwhile
                made.close()
                _remove(path)


def _make(path: Path, size: int, stop: threading.Event, *, mapped: bool) -> Room | None:
    """Make a file; shorter than ``size`` if stopped, None if stopped at once. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags, 0o600)
    try:
        at = 0
        while at < size and not stop.is_set():
            piece = min(_PIECE, size - at)
            os.posix_fallocate(fd, at, piece)
            at += piece
        if not at:
            return None
        return Room(at, os.fstat(fd).st_ino, _map(fd, at, stop) if mapped else None)
    finally:
        os.close(fd)


def _map(fd: int, size: int, stop: threading.Event) -> mmap.mmap | None:
    """Map the whole file with its pages in place; None if that fails or was stopped."""
    try:
        mapped = mmap.mmap(fd, size)
    except (OSError, ValueError):  # a limit of address space; somebody has cut the file
        return None
    for begin in range(0, size, _PIECE):
        if stop.is_set() or not populate(mapped, begin, min(_PIECE, size - begin)):
            mapped.close()
            return None
    return mapped


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
