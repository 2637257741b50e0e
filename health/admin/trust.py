"""Holes in what root runs, for installs and the doctor: what closes them."""

from __future__ import annotations

import errno
import shlex
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from health.admin.install import InstallError
from health.node import executed, trust
from health.node.trust import ROOT, Hole, to_come, us

HINT = "the nodes must see the prefix (share it, or put it into their image)"
_MOST_COMMANDS = 4
_MOST = 50  # holes: a prefix that is somebody else's has one at each file


def code(python: str, dirs: Iterable[str], owners: Collection[int] = ROOT) -> list[Hole]:
    """The holes in all that the stubs execute and import, which is not run for this: the
    interpreter and its standard library, and every package directory. Raises InstallError."""
    try:
        found = executed.of_python(python)
    except OSError as error:
        raise InstallError(f"{error.filename or python}: {error.strerror}; {HINT}") from error
    holes: dict[Hole, None] = {}
    for at in trust.of_python(found, dirs, owners):
        holes[at] = None
        if len(holes) >= _MOST:
            break
    return list(holes)


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


def demand(python: str, dirs: Sequence[str], places: Iterable[str] = ()) -> None:
    """Raise InstallError where somebody but root (and us) could change what the stubs execute, or
    what lies in ``places``, of which some may not be there yet."""
    holes = code(python, dirs, us())
    if holes:
        command = repair(str(Path(python).parent.parent), holes)
        raise InstallError(
            f"{holes[0]}: a user who can write there gains root at the next job; {command}"
        )
    for place in places:
        at = to_come(place, us())
        if at:
            text = f"{place}: {at}: root's files must lie where only root can write"
            raise InstallError(f"{text}; {close([at.place])}")


def demand_program(path: str, what: str) -> None:
    """Raise InstallError where others than root, or we, could change a program or file of this
    machine that an install uses."""
    try:
        trust.command([path])
    except OSError as error:
        if error.errno != errno.EPERM or not error.filename:
            raise InstallError(f"{what} {path}: {error.strerror}") from error
        raise InstallError(
            f"{what} {path} is not used: {error.filename} {error.strerror}; "
            f"{close([str(error.filename)])}"
        ) from error
