"""Find by owner what a user's jobs left in memory and on local disks, and remove it.

The user may be writing there at the same time (from another node, on a shared disk), so names
are only used below an open directory, links are removed and never followed, files of other owners
are left alone, and no other file system is entered. ``before`` (wall clock) is when the user had
no other job here: younger files may belong to a job that has started since.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import NamedTuple

from health.node.mountinfo import visible
from health.node.rootfiles import closing

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_DEPTH = 200  # descriptors open at a time; deeper directories are first brought to the top
_IPC_RMID = 0
_KINDS = ("shm", "sem", "msg")


class Whose(NamedTuple):
    """Limits of a removal: this user's files, unchanged since ``before``, on this file system."""

    uid: int
    before: float
    device: int
    top: int  # descriptor of the directory that is being cleared
    deep: list[str]  # names there of what lay too deep
    prefix: str  # of names in the top directory; others stay
    mounted: frozenset[str]  # names there that are not touched: any user's mount may never answer


def clear_dir(
    path: str, uid: int, before: float, until: float, prefix: str = ""
) -> tuple[int, list[str]]:
    """Remove all of the user's files in one directory; return how many, and what stayed.

    Raises OSError if the directory itself cannot be opened. ``until``: monotonic seconds;
    ``prefix``: only what has such a name.
    """
    with closing(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        whose = Whose(uid, before, os.fstat(fd).st_dev, fd, [], prefix, _mounted(path))
        removed, left = _clear(fd, whose, until, 0)
        while whose.deep:
            gone, stay = _remove(fd, whose.deep.pop(), whose, until, 0)
            removed, left = removed + gone, left + stay
        return removed, left[:100]


def _mounted(path: str) -> frozenset[str]:
    """Names in this directory on which something is mounted."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = visible(file.read())
    top = os.path.realpath(path).rstrip("/") + "/"
    return frozenset(point.removeprefix(top) for point in points if point.startswith(top))


def _clear(directory: int, whose: Whose, until: float, depth: int) -> tuple[int, list[str]]:
    removed = 0
    left: list[str] = []
    with os.scandir(directory) as entries:
        start = "" if depth else whose.prefix
        names = [entry.name for entry in entries if entry.name.startswith(start)]
    for name in names:
        if not depth and name in whose.mounted:
            continue
        if time.monotonic() > until:
            return removed, [*left, "no time for the rest"]
        try:
            info = os.lstat(name, dir_fd=directory)
            if info.st_uid != whose.uid:
                if depth:
                    left.append(f"{name}: not the user's")
                continue
            if info.st_ctime > whose.before:
                continue
            if stat.S_ISDIR(info.st_mode):
                gone, stay = _remove(directory, name, whose, until, depth)
                removed += gone
                left += stay
                continue
            os.unlink(name, dir_fd=directory)
            removed += 1
        except FileNotFoundError:
            continue
        except OSError as error:
            left.append(f"{name}: {error.strerror}")
    return removed, left[:100]


def _remove(
    directory: int, name: str, whose: Whose, until: float, depth: int
) -> tuple[int, list[str]]:
    """Remove a directory with its content; one that lies too deep is moved to the top for later."""
    removed = 0
    left: list[str] = []
    try:
        if depth >= _DEPTH:
            fresh = f".robust-deep.{os.urandom(8).hex()}"
            os.rename(name, fresh, src_dir_fd=directory, dst_dir_fd=whose.top)
            whose.deep.append(fresh)
            return 0, []
        removed, stay = _clear_below(directory, name, whose, until, depth)
        left = [f"{name}/{inner}" for inner in stay]
        os.rmdir(name, dir_fd=directory)
        removed += 1
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # what stays in it is told, or younger
            left.append(f"{name}: {error.strerror}")
    return removed, left


def _clear_below(
    directory: int, name: str, whose: Whose, until: float, depth: int
) -> tuple[int, list[str]]:
    with closing(os.open(name, _OPEN, dir_fd=directory)) as fd:
        info = os.fstat(fd)
        if info.st_dev != whose.device:
            return 0, ["another file system"]
        if info.st_uid != whose.uid:  # exchanged since
            return 0, ["not the user's"]
        return _clear(fd, whose, until, depth + 1)


def ipc_of(text: str, uid: int, before: float) -> list[int]:
    """Ids of the System V objects that the user owns and made, from /proc/sysvipc/KIND. Pure."""
    rows = [line.split() for line in text.splitlines()]
    if not rows or not {"uid", "cuid", "ctime"} <= set(rows[0]):
        return []
    owner, maker, changed = (rows[0].index(name) for name in ("uid", "cuid", "ctime"))
    return [
        int(row[1])
        for row in rows[1:]
        if len(row) == len(rows[0])
        and row[owner] == row[maker] == str(uid)
        and int(row[changed]) < int(before)
    ]


def clear_ipc(uid: int, before: float) -> int:
    """Remove the user's shared memory, semaphores and message queues; how many went."""
    removed = 0
    for kind in _KINDS:
        try:
            with open(f"/proc/sysvipc/{kind}", encoding="ascii") as file:
                ids = ipc_of(file.read(), uid, before)
        except OSError:
            continue  # a kernel without them
        if not ids:
            continue
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        for number in ids:
            if kind == "sem":
                failed = libc.semctl(number, 0, _IPC_RMID)
            elif kind == "shm":
                failed = libc.shmctl(number, _IPC_RMID, None)
            else:
                failed = libc.msgctl(number, _IPC_RMID, None)
            removed += not failed
    return removed
