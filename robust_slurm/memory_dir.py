"""A process's private directory in memory, removed at its end, or when its successor starts.

The process holds a lock on its directory, and the kernel drops the lock when the process dies.
So every process that makes such a directory first removes those of its user that nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

LOCAL = ("/dev/shm", "/tmp")  # of this node alone: a lock seen here is the holder's
ROOM = 1 << 20  # bytes that must be free
PREFIX = "robust-"
_OURS = re.compile(
    r"robust-(\d+\.[\w+]+|ckpt-\d+)-[a-z0-9_]{8}", re.ASCII
)  # nothing of the user's own
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class MemoryDir:
    """A new directory ``robust-NAME-*``, 0700. Raises OSError."""

    def __init__(self, name: str, base: str = "") -> None:
        """``base``: where; "" is the first place in memory, else on disk, that can be written and
        is not full."""
        base = base or next(filter(_usable, LOCAL), tempfile.gettempdir())
        remove_stale(base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{name}-", dir=base))
            # Until the lock is held, another process that starts may take it for a stale one.
            try:
                self._lock = os.open(self.path, _OPEN)
            except FileNotFoundError:
                continue
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():
                return
            os.close(self._lock)

    def close(self) -> None:
        """Remove the directory with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def existing(name: str) -> list[Path]:
    """Return this user's directories ``robust-NAME-*`` on this node; their makers may have died.

    Nobody else can make or take one: a directory of another user is left out.
    """
    found = []
    for base in dict.fromkeys((*LOCAL, tempfile.gettempdir())):
        try:
            with os.scandir(base) as entries:
                named = [each.path for each in entries if each.name.startswith(f"{PREFIX}{name}-")]
        except OSError:
            continue
        for path in named:
            try:
                info = os.lstat(path)
            except OSError:
                continue
            if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid():
                found.append(Path(path))
    return found


def _usable(place: str) -> bool:
    try:
        free = os.statvfs(place)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK) and free.f_bavail * free.f_frsize >= ROOM


def remove_stale(base: str) -> None:
    """Remove this user's directories there whose processes have died."""
    try:
        with os.scandir(base) as entries:
            found = [entry.path for entry in entries if _OURS.fullmatch(entry.name)]
    except OSError:
        return
    for path in found:
        try:
            if os.lstat(path).st_uid != os.getuid():
                continue
            lock = os.open(path, _OPEN)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its process lives
        finally:
            os.close(lock)
