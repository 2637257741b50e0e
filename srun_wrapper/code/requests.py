"""Requests to change a job's code: lines that robust-update appends and robust-srun follows.

The file exists before the first request and is opened anew at every look, because a shared file
system shows a new file, or more of a known one, late to those who do not open it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from robust_slurm.state_dir.ledger import append_line
from srun_wrapper.code.versions import Change, Version

LOOK = 0.3  # s between two looks
LEASE = 3600.0  # s between two renewals of a store's time of change; it is kept for days
_MOST = 1 << 20  # bytes that one look reads


class Request(msgspec.Struct):
    """One line. ``version`` is the snapshot that was taken for it, None for a known version."""

    action: Literal["change", "cancel"]
    change: Change
    version: Version | None = None


def send(path: Path, request: Request) -> None:
    """Append a request to a job's file. Raises OSError."""
    if path.lstat().st_uid != os.getuid():
        raise PermissionError(f"{path} is another user's")
    append_line(path, msgspec.to_builtins(request))


def read_from(path: Path, offset: int) -> tuple[list[tuple[Request, int]], int]:
    """Return the whole requests beyond ``offset`` bytes, each with the offset after it, and where
    the next one begins.

    Raises OSError: also for a link, and for a file that another user owns.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise PermissionError(f"{path} is not this user's own file")
        data = os.pread(fd, _MOST, offset) if info.st_size > offset else b""
    finally:
        os.close(fd)
    whole, newline, _ = data.rpartition(b"\n")
    if not newline:  # nothing new, or a line that no robust-update writes
        return [], offset + (len(data) if len(data) == _MOST else 0)
    found = []
    for line in whole.split(b"\n"):
        offset += len(line) + 1
        try:
            found.append((msgspec.json.decode(line, type=Request), offset))
        except (ValueError, RecursionError):  # no UTF-8, or nested too deep
            continue
    return found, offset


class Follower:
    """Looks for requests in a thread of its own: the file system may stall."""

    def __init__(
        self,
        path: Path,
        offset: int,
        got: Callable[[Request, int], None],
        store: Path | None = None,
    ) -> None:
        """``got`` is called in that thread with each request and the offset after it.

        ``store``: the directory of the snapshots, which is renewed so that no job prunes it.
        """
        self._path, self._offset = path, offset
        self._got = got
        self._store = store
        self._renew_at = 0.0
        self._over = threading.Event()
        threading.Thread(target=self._run, name="code requests", daemon=True).start()

    def _run(self) -> None:
        while not self._over.wait(LOOK):
            self._renew()
            try:
                found, self._offset = read_from(self._path, self._offset)
            except OSError:
                continue  # away for now; nothing is lost
            for request, after in found:
                self._got(request, after)

    def _renew(self) -> None:
        if self._store is not None and time.monotonic() >= self._renew_at:
            self._renew_at = time.monotonic() + LEASE
            with contextlib.suppress(OSError):
                os.utime(self._store)

    def close(self) -> None:
        self._over.set()
