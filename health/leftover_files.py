"""Whose files fill a file system: a bounded look into the directories that everybody can write.

What lies there is hostile: no link is followed, no name is repeated, nothing is opened, and
neither millions of entries nor a file that claims to be huge can make the look long or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from health.mountinfo import Mount, holding
from health.system import System

EVERYBODYS = ("/tmp", "/var/tmp", "/dev/shm")
FIRST_USER = 1000  # uid; lower ones are the system's (UID_MIN of login.defs)
ENTRIES = 2000  # looked at
DIRECTORY_BYTES = 1 << 20  # of a directory itself; a larger one holds too many entries to list
_ENTRY_BYTES = 64  # at least what an entry takes in such a directory


class Holdings(NamedTuple):
    """What users hold there, as far as it was seen. ``said``: the largest holder, in words."""

    bytes: int
    files: int
    said: str


def holdings(system: System, path: str, mounts: Mapping[str, Mount], total: int) -> Holdings:
    """Users' files on the file system of ``path``, which has ``total`` bytes."""
    disk = _device(mounts, path)
    waiting = [top for top in EVERYBODYS if _device(mounts, top) == disk]
    if not mounts and path in EVERYBODYS:
        waiting = [path]
    sizes: dict[int, int] = {}
    files: dict[int, int] = {}
    left = ENTRIES
    while waiting and left > 0:
        top = waiting.pop(0)
        try:
            entries = system.names(top)
        except OSError:
            continue
        for name in entries[:left]:
            left -= 1
            here = f"{top}/{name}"
            if here in mounts:
                continue
            try:
                entry = system.entry(here)
            except OSError:
                continue
            large = entry.kind == "dir" and entry.size > DIRECTORY_BYTES
            if entry.kind == "dir" and not large:
                waiting.append(here)
            if entry.uid >= FIRST_USER:
                count = entry.size // _ENTRY_BYTES if large else 1
                files[entry.uid] = files.get(entry.uid, 0) + count
                sizes[entry.uid] = sizes.get(entry.uid, 0) + min(entry.size, total)
    most = max(sizes, key=lambda uid: (sizes[uid], files[uid]), default=None)
    said = ""
    if most is not None:
        cut = f" (first {ENTRIES} entries)" if left <= 0 else ""
        said = f"uid {most} holds {sizes[most] / (1 << 30):.1f} GiB in {files[most]} files{cut}"
    return Holdings(sum(sizes.values()), sum(files.values()), said)


def _device(mounts: Mapping[str, Mount], path: str) -> str:
    mount = holding(mounts, path)
    return mount.device if mount else path
