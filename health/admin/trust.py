"""Holes: places where others than root can change what root runs. For installs and the doctor."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from health.admin.install import InstallError

ROOT = (0,)
_MOST_PARTS = 200  # of a path, links followed
_MOST_COMMANDS = 4
_PACKAGES = ("health", "prolog", "epilog", "robust_slurm", "ClusterShell")


class Hole(NamedTuple):
    """A place that somebody else owns or can write, and what is wrong with it."""

    place: str
    what: str

    def __str__(self) -> str:
        return f"{self.place} {self.what}"


def hole(path: str, owners: Collection[int] = ROOT) -> Hole | None:
    """The first place where others than ``owners`` could replace this path; None: nowhere.

    Looks at the file and at every directory and link on the way to it.
    """
    way = _way(path)
    if not way:
        return Hole(path, "has too many levels of symbolic links")
    for place in way:
        try:
            info = os.lstat(place)
        except OSError as error:
            return Hole(place, f"cannot be checked: {error.strerror}")
        if info.st_uid not in owners:
            return Hole(place, f"belongs to uid {info.st_uid}")
        sticky = stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        if info.st_mode & 0o022 and not sticky and not stat.S_ISLNK(info.st_mode):
            return Hole(place, f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})")
    return None


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


def code(python: str, dirs: Iterable[str], owners: Collection[int] = ROOT) -> list[Hole]:
    """The holes in all that the stubs execute: the interpreter, our packages, pynvml."""
    paths = [python]
    for top in dirs:
        paths += [f"{top}/pynvml.py"] if Path(top, "pynvml.py").exists() else []
        for name in _PACKAGES:
            for parent, below, files in os.walk(f"{top}/{name}"):
                below.sort()
                paths += [f"{parent}/{file}" for file in files if file.endswith((".py", ".pyc"))]
    found = [at for path in paths if (at := hole(path, owners))]
    return list(dict.fromkeys(found))


def repair(prefix: str, holes: Sequence[Hole]) -> str:
    """The command that closes the holes. It covers a whole prefix only in a virtual environment:
    a `chown -R` of /usr would break the machine."""
    inside = all(at.place == prefix or at.place.startswith(f"{prefix}/") for at in holes)
    if inside and Path(prefix, "pyvenv.cfg").exists():
        return close([prefix], recursive=True)
    return close([at.place for at in holes[:_MOST_COMMANDS]])


def close(places: Sequence[str], recursive: bool = False) -> str:
    names, flag = shlex.join(places), "-R " if recursive else "-h "
    return f"chown {flag}root:root {names} && chmod {'-R ' if recursive else ''}go-w {names}"


def demand(python: str, dirs: Sequence[str], places: Iterable[str]) -> None:
    """Raise InstallError where somebody but root (and us) could change what the stubs execute, or
    what lies in ``places``, of which some may not be there yet."""
    owners = {0, os.geteuid()}
    holes = code(python, dirs, owners)
    if holes:
        command = repair(str(Path(python).parent.parent), holes)
        raise InstallError(
            f"{holes[0]}: a user who can write there gains root at the next job; {command}"
        )
    for place in places:
        there = next(p for p in (Path(place), *Path(place).parents) if os.path.lexists(p))
        at = hole(str(there), owners)
        if at:
            text = f"{place}: {at}: root's files must lie where only root can write"
            raise InstallError(f"{text}; {close([at.place])}")
