"""The files that a Python interpreter runs at start and import, and who can change them.

The interpreter is not started for this: it would run the ``import`` lines of every *.pth file of
its environment. Checked are the program with each link on the way to it, pyvenv.cfg, and the
library directories of the environment and of its base installation, with all files and with the
directories that their *.pth files name. In doubt more is checked: every version of Python in a
prefix counts. An editable install that names its source in code, not in a line of a *.pth file, is
not followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from health.node import rootfiles

_LINKS = 40  # as the kernel's own limit
_LIBRARIES = ("lib/python3*", "lib64/python3*", "lib/libpython3*", "lib64/libpython3*")


def trust(python: str) -> None:
    """Raise OSError, with the place and the reason, unless only root can change all of it.

    May take seconds, and hang with a file system.
    """
    for link in _chain(python):
        place = os.path.dirname(link)  # noqa: PTH120
        os.close(rootfiles.open_dir(place))
        rootfiles.check(os.stat(link), link)  # noqa: PTH116
        for beside in (place, os.path.dirname(place)):  # noqa: PTH120 - a pyvenv.cfg may come there
            rootfiles.check(os.stat(beside), beside)  # noqa: PTH116
    todo = list(_places(python))
    seen: set[str] = set()
    while todo:
        place = os.path.realpath(todo.pop())
        if place in seen:
            continue
        seen.add(place)
        os.close(rootfiles.open_dir(os.path.dirname(place)))  # noqa: PTH120
        todo += _walk(place)


def _chain(path: str) -> list[str]:
    """The path, and where each link leads."""
    found = [os.path.abspath(path)]  # noqa: PTH100
    while os.path.islink(found[-1]):  # noqa: PTH114
        if len(found) > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(found[-1])  # noqa: PTH115
        found.append(os.path.join(os.path.dirname(found[-1]), target))  # noqa: PTH118, PTH120
    return [*found, os.path.realpath(path)]


def _places(python: str) -> Iterator[str]:
    """Files and directories from which it takes code before a script's first line, or imports."""
    prefixes = {os.path.dirname(os.path.dirname(link)) for link in _chain(python)}  # noqa: PTH120
    for prefix in sorted(prefixes):
        for config in (f"{prefix}/pyvenv.cfg", f"{prefix}/bin/pyvenv.cfg"):
            if os.path.lexists(config):
                yield config
                prefixes |= {os.path.dirname(home) for home in _homes(config)}  # noqa: PTH120
    for prefix in sorted(prefixes | ({"/usr/local"} if "/usr" in prefixes else set())):
        for pattern in _LIBRARIES:
            yield from map(str, Path(prefix).glob(pattern))


def _homes(config: str) -> list[str]:
    with open(config, encoding="utf-8", errors="replace") as file:
        pairs = [line.partition("=") for line in file.read(1 << 16).splitlines()]
    return [os.path.realpath(value.strip()) for key, _, value in pairs if key.strip() == "home"]


def _walk(top: str) -> list[str]:
    """Check all that lies there; return the places that its links and *.pth files lead to."""
    info = os.lstat(top)
    rootfiles.check(info, top)
    beside: list[str] = []
    todo = [top] if stat.S_ISDIR(info.st_mode) else []
    while todo:
        directory = todo.pop()
        with os.scandir(directory) as entries:
            for entry in entries:
                info = entry.stat(follow_symlinks=False)
                if stat.S_ISLNK(info.st_mode):  # a link's own mode says nothing
                    if info.st_uid not in (0, os.geteuid()):
                        rootfiles.check(info, entry.path)
                    beside += [entry.path] if os.path.exists(entry.path) else []  # noqa: PTH110
                    continue
                rootfiles.check(info, entry.path)
                if stat.S_ISDIR(info.st_mode):
                    todo.append(entry.path)
                elif entry.name.endswith(".pth"):
                    beside += _named(entry.path)
    return beside


def _named(pth: str) -> list[str]:
    """The directories that a *.pth file puts on the path, as the site module reads it."""
    with open(pth, encoding="utf-8", errors="replace") as file:
        lines = [line.strip() for line in file.read(1 << 20).splitlines()]
    top = os.path.dirname(pth)  # noqa: PTH120
    places = [
        os.path.join(top, line)  # noqa: PTH118
        for line in lines
        if line and not line.startswith(("#", "import ", "import\t"))
    ]
    return [place for place in places if os.path.exists(place)]  # noqa: PTH110
