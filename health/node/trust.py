"""The look at who could change what root runs, made before anything of it is run.

The paths come from ``health.node.executed``. A path is root's if it, and each directory and link on
the way to it, belong to root and can be written by nobody else; so must be all that lies below a
directory from which code is imported, links followed. May take seconds, and hang with a file
system.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from health.node import executed
from health.node.executed import PythonFiles
from health.node.rootfiles import wrong
from robust_slurm import commands

ROOT = (0,)
_MOST_PARTS = 200  # of a path, links followed


class Hole(NamedTuple):
    """A place that somebody else owns or can write, and what is wrong with it."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.what}"

    @property
    def error(self) -> PermissionError:
        """The same, to be raised."""
        return PermissionError(errno.EPERM, self.what, self.place)


def us() -> frozenset[int]:
    """The users that may own what we run: root, and our own."""
    return frozenset((0, os.geteuid()))


def hole(path: str, owners: Collection[int] = ROOT) -> Hole | None:
    """The first place where others than ``owners`` could replace this path; None: nowhere.

    Looks at the file and at every directory and link on the way to it.
    """
    way = _way(path)
    if not way:
        return Hole(path, "has too many levels of symbolic links")
    for place in way:
        try:
            found = wrong(os.lstat(place), sticky=True, owners=owners)
        except OSError as error:
            return Hole(place, f"cannot be checked: {error.strerror}")
        if found:
            return Hole(place, found)
    return None


def to_come(path: str, owners: Collection[int] = ROOT) -> Hole | None:
    """The same for a path that may not be there yet: the place from which others could make it."""
    there = next(str(p) for p in (Path(path), *Path(path).parents) if os.path.lexists(p))
    return hole(there, owners) or (closed(there, owners) if there != str(Path(path)) else None)


def closed(path: str, owners: Collection[int] = ROOT) -> Hole | None:
    """The hole in a directory to which others could add something, sticky or not."""
    try:
        found = wrong(os.stat(path), owners=owners)  # noqa: PTH116
    except OSError as error:
        return Hole(path, f"cannot be checked: {error.strerror}")
    return Hole(path, found) if found else None


def below(
    tops: Iterable[str], owners: Collection[int] = ROOT, without: Collection[str] = ()
) -> Iterator[Hole]:
    """The holes on the way to these places and in all that lies there, but in ``without``.

    Links are followed; one that leads to nothing must lead to where only root can make something.
    """
    todo = list(tops)[::-1]
    seen: set[str] = set()
    while todo:
        top = todo.pop()
        at = hole(top, owners) if os.path.exists(top) else to_come(_end(top), owners)  # noqa: PTH110
        if at:
            yield at
        real = os.path.realpath(top)
        if real in seen or not os.path.exists(real):  # noqa: PTH110
            continue
        seen.add(real)
        if at := closed(real, owners):
            yield at
        if os.path.isdir(real):  # noqa: PTH112
            for found in _inside(real, owners, without):
                if isinstance(found, str):
                    todo.append(found)
                else:
                    yield found


def _inside(top: str, owners: Collection[int], without: Collection[str]) -> Iterator[Hole | str]:
    """The holes in all that lies in a directory, and the links there."""
    todo = [top]
    while todo:
        directory = todo.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    info = entry.stat(follow_symlinks=False)
                    if found := wrong(info, owners=owners):
                        yield Hole(entry.path, found)
                    if stat.S_ISLNK(info.st_mode):
                        yield entry.path
                    elif stat.S_ISDIR(info.st_mode) and entry.name not in without:
                        todo.append(entry.path)
        except OSError as error:
            yield Hole(directory, f"cannot be checked: {error.strerror}")


def _way(path: str) -> list[str]:
    """List each directory and link on the way to a path, and its target; empty: a circle."""
    passed = ["/"]
    parts = path.split("/")[::-1]
    while parts:
        if len(passed) > _MOST_PARTS:
            return []
        part = parts.pop()
        if part == "..":
            passed.append(str(Path(passed[-1]).parent))
        elif part not in ("", "."):
            place = f"{passed[-1].rstrip('/')}/{part}"
            passed.append(place)
            try:
                target = os.readlink(place)  # noqa: PTH115 - a plain string is wanted
            except OSError:  # no link
                continue
            parts += target.split("/")[::-1]
            passed.append("/" if target.startswith("/") else str(Path(place).parent))
    return list(dict.fromkeys(passed))


def _end(path: str) -> str:
    """The place that a link leads to, be it there or not."""
    return os.path.realpath(path)


# ---- what root runs


def of_python(
    found: PythonFiles, tops: Iterable[str], owners: Collection[int] = ROOT
) -> Iterator[Hole]:
    """The holes in what an interpreter runs with ``-I -S``, and in these package directories."""
    at = [hole(path, owners) for path in found.files]
    at += [closed(path, owners) for path in found.closed]
    yield from filter(None, at)
    yield from below(found.library, owners, ("site-packages", "dist-packages"))
    yield from below(tops, owners)


def command(argv: Sequence[str]) -> None:
    """Raise PermissionError if others than root, or we, could change what a command runs.

    FileNotFoundError if there is no such program.
    """
    os.stat(argv[0])  # noqa: PTH116
    for path in executed.of_command(argv):
        at = to_come(path, us())
        if at is None and os.path.isdir(path):  # noqa: PTH112 - programs may come there
            at = closed(path, us())
        if at:
            raise at.error


def slurm_path(places: str) -> tuple[str, list[Hole]]:
    """Return a PATH without the directories whose Slurm commands others could change; their holes.

    A directory that has none of these commands stays.
    """
    kept, holes = [], []
    for place in places.split(":"):
        files, directories = executed.of_slurm(place)
        found = [hole(path, us()) for path in files] + [closed(d, us()) for d in directories]
        at = next(filter(None, found), None)
        if at:
            holes.append(at)
        else:
            kept.append(place)
    return ":".join(kept), holes


def interpreter(python: str) -> None:
    """Raise OSError, with the place and the reason, unless only root can change what ``starting``
    has it run."""
    found = executed.of_python(python)
    for at in of_python(found, found.sites, us()):
        raise at.error
    if found.editable and not found.holding("robust_slurm"):
        raise OSError(errno.ENOENT, absent(found), python)


def starting(python: str) -> list[str]:
    """Return the words by which root starts one of our modules in an interpreter of the site's.

    Without ``site``: no code of a *.pth file runs, and on the path are the package directories that
    are root's. One that a user has made since the look is not.
    """
    try:
        found = executed.of_python(python)
        sites = [s for s in found.sites if not (hole(s, us()) or closed(s, us()))]
        place = found.holding("robust_slurm")
    except OSError:
        sites, place = [], ""
    options = ["-I", "-S", "-X", f"{commands.SITES}={os.pathsep.join(sites)}"]
    if place not in sites:  # as after a look that refused it: it finds nothing
        return [python, *options, "-m", "robust_slurm.commands"]
    return [python, *options, f"{place}/robust_slurm/commands.py"]


def absent(found: PythonFiles) -> str:
    """Return why an interpreter's environment has no robust-slurm."""
    if found.editable:
        return (
            f"{found.editable} finds robust-slurm by code, which root does not run (pip install "
            "-e): install it without -e"
        )
    return f"robust-slurm is not in {' or '.join(found.sites) or 'any site-packages'}"
