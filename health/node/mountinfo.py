"""The kernel's table of mounts and /etc/fstab, read as a program needs them. Pure.

Formats: proc_pid_mountinfo(5), fstab(5). Both write blank, tab, newline and backslash as octal.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from robust_slurm.linux.filesystem_types import NETWORK

LOCAL = frozenset(("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"))  # on a disk of this node

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One mount that a process sees."""

    id: str
    parent: str
    device: str  # "0:25": the same for every mount of one file system
    point: str
    options: frozenset[str]  # of this mount
    fstype: str
    source: str
    super_options: frozenset[str]  # of the file system

    @property
    def read_only(self) -> bool:
        return "ro" in self.options or "ro" in self.super_options

    @property
    def remote(self) -> bool:
        return is_remote(self.fstype)

    @property
    def of_user(self) -> bool:
        """True for what a user has mounted himself, by fusermount: its answers are his."""
        return any(
            word.startswith("user_id=") and word != "user_id=0" for word in self.super_options
        )

    @property
    def may_hang(self) -> bool:
        """True if a touch may hang, or mount something."""
        return self.remote or self.fstype == "autofs"


class FstabLine(NamedTuple):
    source: str
    point: str
    fstype: str
    options: frozenset[str]


def is_remote(fstype: str) -> bool:
    """True for the types that the gate touches only under a deadline, as they may hang."""
    return fstype in NETWORK or fstype.startswith("fuse.")


def visible(text: str) -> dict[str, Mount]:
    """/proc/self/mountinfo -> mount point to the mount one reaches there.

    Of stacked mounts that is the top one; what is covered by a later mount of a directory above
    it is left out.
    """
    at: dict[str, list[Mount]] = {}
    known = set()
    for line in text.splitlines():
        mount = _mount(line)
        if mount is not None:
            at.setdefault(mount.point, []).append(mount)
            known.add(mount.id)
    tops: dict[str, Mount] = {}
    for point in sorted(at, key=len):  # a directory before what lies in it
        waiting = at[point]
        under = holding(tops, point)
        while True:
            # A mount's parent is what it was mounted on; in a container it may be out of sight.
            top = next(
                (m for m in waiting if not under or m.parent == under.id or m.parent not in known),
                None,
            )
            if top is None:
                break
            tops[point] = under = top
            waiting.remove(top)
    return tops


def holding(mounts: Mapping[str, Mount], path: str) -> Mount | None:
    """The mount that a path (no links in it) lies on."""
    while True:
        if path in mounts:
            return mounts[path]
        if path in ("/", ""):
            return None
        path = path.rpartition("/")[0] or "/"


def resolve(mounts: Mapping[str, Mount], path: str, link: Callable[[str], str]) -> str:
    """The path with its symbolic links followed (``link`` reads one), as far as that is safe.

    What lies on a network file system is not looked at: that might hang.
    """
    done, waiting, followed = "/", [part for part in path.split("/") if part], 0
    while waiting:
        here = posixpath.normpath(posixpath.join(done, waiting.pop(0)))
        mount = holding(mounts, here)
        if mount is not None and mount.may_hang:
            return posixpath.normpath(posixpath.join(here, *waiting))
        try:
            target = link(here)
        except OSError:  # EINVAL: no link
            done = here
            continue
        followed += 1
        if followed > 16:
            return path
        waiting = [part for part in target.split("/") if part] + waiting
        done = "/" if target.startswith("/") else posixpath.dirname(here)
    return done


def fstab(text: str) -> list[FstabLine]:
    """/etc/fstab without comments, swap and lines that are too short."""
    out = []
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 3 or fields[0].startswith("#"):
            continue
        source, point, fstype = (unescape(field) for field in fields[:3])
        if point.startswith("/"):
            options = frozenset(unescape(fields[3]).split(",")) if len(fields) > 3 else frozenset()
            out.append(FstabLine(source, point.rstrip("/") or "/", fstype, options))
    return out


def unescape(text: str) -> str:
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), text) if "\\" in text else text


def _mount(line: str) -> Mount | None:
    """id parent major:minor root point options [tags…] - type source super-options"""
    left, dash, right = line.partition(" - ")
    fields, tail = left.split(" "), right.split(" ")
    if not dash or len(fields) < 6 or len(tail) < 3:
        return None
    return Mount(
        fields[0],
        fields[1],
        fields[2],
        unescape(fields[4]),
        frozenset(fields[5].split(",")),
        unescape(tail[0]),
        unescape(tail[1]),
        frozenset(tail[2].split(",")),
    )
