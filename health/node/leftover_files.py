"""The owners of files that fill a file system: a look into directories that users can write.

The content may be hostile: no link is followed, no name is put into a message, only directories
are opened, and each of them is read as a stream. What is not seen proves nothing: it may be a
user's. A user can also hold a file that has no name any more, and that no process shows (on its way
through a socket), so only the system's own files that were seen prove that a user is innocent.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from health.children.call import call_in_child
from health.node.mountinfo import Mount, holding
from health.node.system import System, Usage
from robust_slurm.text import counted

EVERYBODYS = ("/tmp", "/var/tmp", "/dev/shm", "/home")
FIRST_USER = 1000  # uid; lower ones are the system's (UID_MIN of login.defs)
_BLOCK = 512  # bytes; the unit of st_blocks (stat(2))
_EVERY = 16  # entries between two looks at the clock: a disk may take 10 ms for each
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Holdings(NamedTuple):
    """The files that users hold there, as far as seen. ``said``: the largest holder, in words.

    ``system_bytes``, ``system_files``: what the system's own uids hold for certain; all the rest
    may be users'. ``uid``: of the largest holder; -1: no user's file was seen.
    """

    bytes: int
    files: int
    said: str
    system_bytes: int = 0
    system_files: int = 0
    uid: int = -1


def holdings(
    system: System,
    path: str,
    mounts: Mapping[str, Mount],
    total: int,
    systems: Sequence[str] = (),
    look_s: float = 1.0,
) -> Holdings:
    """Users' files on the file system of ``path``, which has ``total`` bytes, seen in ``look_s``.

    ``systems``: paths below which only the system writes; any other path is looked through whole.
    """
    disk = _device(mounts, path)
    tops = [top for top in EVERYBODYS if _device(mounts, top) == disk] if mounts else []
    if path not in systems:
        tops = [top for top in tops if not top.startswith(f"{path}/")]
        if not any(f"{path}/".startswith(f"{top}/") for top in tops):
            tops.append(path)
    return judge(system.usage(tops, look_s), total)


def judge(usage: Usage, total: int) -> Holdings:
    """The part of a file system of ``total`` bytes that users hold. Pure."""
    users = [row for row in usage.owners if row[0] >= FIRST_USER]
    system = [row for row in usage.owners if row[0] < FIRST_USER]
    said = []
    owner = -1
    if users:
        owner, size, files = max(users, key=lambda row: (row[1], row[2]))
        said.append(
            f"uid {owner} holds {min(size, total) / (1 << 30):.1f} GiB in {counted(files, 'file')}"
        )
    if not usage.whole:
        said.append(f"the search for the files' owners stopped after {usage.entries} entries")
    return Holdings(
        min(sum(row[1] for row in users), total),
        sum(row[2] for row in users),
        ", ".join(said),
        min(sum(row[1] for row in system), total),
        sum(row[2] for row in system),
        owner,
    )


def walk(tops: Sequence[str], deadline_s: float, points: Collection[str] = ()) -> Usage:
    """Count what lies below these directories, by owner; other file systems are not entered.

    ``points``: mount points, which are not touched: a user's own file system may never answer.
    """
    until = time.monotonic() + deadline_s
    size: dict[int, int] = {}
    files: dict[int, int] = {}
    seen, whole = 0, True
    waiting: list[tuple[str, int]] = []
    for top in tops:
        try:
            info = os.lstat(top)
        except OSError:
            continue  # not there
        if stat.S_ISDIR(info.st_mode):  # what a link leads to is another of the directories
            waiting.append((os.path.normpath(top), info.st_dev))
    while waiting:
        here, device = waiting.pop()
        try:
            fd = os.open(here, _OPEN)
        except (FileNotFoundError, NotADirectoryError):
            continue  # gone since, or exchanged
        except OSError:
            whole = False  # a way too long, or a link in its place
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if seen % _EVERY == 0 and time.monotonic() > until:
                        return _usage(size, files, seen, whole=False)
                    seen += 1
                    path = os.path.join(here, entry.name)  # noqa: PTH118 - "/" is a directory too
                    if path in points:
                        continue
                    try:
                        info = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    if info.st_dev != device:
                        continue
                    links = 1 if stat.S_ISDIR(info.st_mode) else max(1, info.st_nlink)
                    mine = info.st_blocks * _BLOCK // links  # each of its names has its part
                    size[info.st_uid] = size.get(info.st_uid, 0) + mine
                    files[info.st_uid] = files.get(info.st_uid, 0) + (links == 1)
                    if stat.S_ISDIR(info.st_mode):
                        waiting.append((path, device))
        except OSError:
            whole = False
        finally:
            os.close(fd)
    return _usage(size, files, seen, whole=whole)


def add_unlinked(usage: Usage, tops: Sequence[str], deadline_s: float) -> Usage:
    """Add users' files without a name that a process has open or mapped, on the same file systems.

    In a child: to look at a process, or at its file, may hang.
    """
    rows, error = call_in_child(lambda: unlinked(tops, 0.8 * deadline_s), deadline_s)
    if error:
        return usage._replace(whole=False)
    size = {uid: bytes_ for uid, bytes_, _ in usage.owners}
    files = {uid: count for uid, _, count in usage.owners}
    for uid, bytes_, count in rows:
        size[uid] = size.get(uid, 0) + bytes_
        files[uid] = files.get(uid, 0) + count
    return _usage(size, files, usage.entries, whole=usage.whole)


def unlinked(tops: Sequence[str], deadline_s: float) -> list[list[int]]:
    """Return what users hold in files without a name: rows of uid, bytes, number of files.

    A file counts for its owner, and one of the system's for the user whose process holds it.
    """
    until = time.monotonic() + deadline_s
    devices = set()
    for top in tops:
        with contextlib.suppress(OSError):
            devices.add(os.lstat(top).st_dev)
    seen: set[tuple[int, int]] = set()
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208
        for place in ("fd", "map_files") if entry.isdigit() else ():
            for info in _nameless(f"/proc/{entry}/{place}", until):
                key = (info.st_dev, info.st_ino)
                if info.st_dev not in devices or key in seen:
                    continue
                owner = info.st_uid if info.st_uid >= FIRST_USER else _holder(entry)
                if owner >= FIRST_USER:
                    seen.add(key)
                    row = found.setdefault(owner, [owner, 0, 0])
                    row[1] += info.st_blocks * _BLOCK
                    row[2] += 1
    return list(found.values())


def _nameless(place: str, until: float) -> Iterator[os.stat_result]:
    """Yield the files without a name that one directory of /proc leads to."""
    try:
        with os.scandir(place) as entries:
            for entry in entries:
                if time.monotonic() > until:
                    return
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).endswith(" (deleted)"):  # noqa: PTH115
                        info = entry.stat()
                        if info.st_nlink == 0:
                            yield info
    except OSError:
        return  # it has ended, or has no memory of its own


def _holder(pid: str) -> int:
    """The real uid of a process; -1: it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1])
    return -1


def _usage(size: Mapping[int, int], files: Mapping[int, int], seen: int, *, whole: bool) -> Usage:
    return Usage([[uid, size[uid], files[uid]] for uid in sorted(size)], seen, whole)


def _device(mounts: Mapping[str, Mount], path: str) -> str:
    mount = holding(mounts, path)
    return mount.device if mount else path
