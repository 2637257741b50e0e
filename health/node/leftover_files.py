"""The owners of files that fill a file system: a look into directories that users can write.

The content may be hostile: no link is followed, no name is put into a message, only directories
are opened, and each of them is read as a stream. A search that ran out of time, or could not enter
a directory, proves nothing: the missing part may be a user's.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

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

    ``whole``: everything was seen, so that what is missing there is not users' files.
    """

    bytes: int
    files: int
    said: str
    whole: bool


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
    said = []
    if users:
        uid, size, files = max(users, key=lambda row: (row[1], row[2]))
        said.append(
            f"uid {uid} holds {min(size, total) / (1 << 30):.1f} GiB in {counted(files, 'file')}"
        )
    if not usage.whole:
        said.append(f"the search for the files' owners stopped after {usage.entries} entries")
    held = min(sum(row[1] for row in users), total)
    return Holdings(held, sum(row[2] for row in users), ", ".join(said), usage.whole)


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
                    size[info.st_uid] = size.get(info.st_uid, 0) + info.st_blocks * _BLOCK
                    files[info.st_uid] = files.get(info.st_uid, 0) + 1
                    if stat.S_ISDIR(info.st_mode):
                        waiting.append((path, device))
        except OSError:
            whole = False
        finally:
            os.close(fd)
    return _usage(size, files, seen, whole=whole)


def _usage(size: Mapping[int, int], files: Mapping[int, int], seen: int, *, whole: bool) -> Usage:
    return Usage([[uid, size[uid], files[uid]] for uid in sorted(size)], seen, whole)


def _device(mounts: Mapping[str, Mount], path: str) -> str:
    mount = holding(mounts, path)
    return mount.device if mount else path
