"""Compare the imports of a warm interpreter with those that a fresh one would make now.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque

from robust_slurm.auto.script import NO_FILE
from robust_slurm.auto.snapshot_paths import foreign

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence
    from typing import Any

IDLE = 10.0  # s between two looks at a file while nobody asks
_SLICE = 0.2  # s that looking may keep a request waiting
_AT_REQUEST = 0.5  # s that a request may take for it
_TICK = 10**7  # ns; steps in which the kernel's clock for files may go
_NOT_OURS = ("__main__", "sitecustomize", "usercustomize")
_GENERATED = "torch._inductor."
"""Modules that torch.compile writes just before it loads them, under a name made of their text."""


class Sources:
    """The files of all modules that are loaded now."""

    def __init__(self, known: Collection[str], program: str, since: float) -> None:
        """``known``: what every interpreter has loaded before its script's directory counts.
        ``program``: ``sys.argv[0]``. ``since``: wall clock from before the first import; raises
        RuntimeError if a file has changed after that, which may be after it was read."""
        self._known = known
        self._program = program
        self._portions = tuple(_portions())
        self._real = tuple(_real([*(path for _, path in _files()), *self._portions]))
        self._seen: deque[tuple[str, tuple[int, ...], float]] = deque()
        for name, path in _files():
            stamp = _stamp(path)
            self._seen.append((path, stamp, time.monotonic()))
            if max(stamp[:2]) > since * 1e9 - _TICK and not name.startswith(_GENERATED):
                raise RuntimeError(f"{path} has changed")

    def due(self) -> float:
        """Seconds until ``recheck`` has something to do again."""
        return max(_SLICE, self._seen[0][2] + IDLE - time.monotonic())

    def recheck(self) -> None:
        """Check some files again, for a moment. Raises RuntimeError if one has changed."""
        self._check(_SLICE, time.monotonic() - IDLE)

    def _check(self, seconds: float, before: float) -> None:
        """Check the files that were seen before this moment, the longest ago first."""
        begin = now = time.monotonic()
        for path, stamp, seen in list(self._seen):
            if seen > before or now > begin + seconds:
                return
            if _stamp(path) != stamp:
                raise RuntimeError(f"{path} has changed")
            now = time.monotonic()
            self._seen.popleft()
            self._seen.append((path, stamp, now))

    def check_request(self, directory: str, program: str = "") -> None:
        """Raise RuntimeError if a file has changed, and if the script that is run in
        ``directory`` has modules of its own under names that were imported from elsewhere.
        ``program``: the script, if it may be another one than at the start.

        On a slow file system, what there is no time for must have been seen a moment ago."""
        now = time.monotonic()
        self._check(_AT_REQUEST, now)
        if self._seen[0][2] < now - 3 * IDLE:
            raise RuntimeError("the file system is too slow to see whether a module has changed")
        for beside in _beside(program or self._program, directory):
            name = self._shadowed(beside)
            if name:
                raise RuntimeError(f"there is another module {name} in {beside}")

    def check_code(self, environ: Mapping[str, str]) -> None:
        """Raise RuntimeError if a module, the interpreter or an entry of its path is of another
        version of the code than this rank's: of another snapshot, or of the user's directory."""
        files = [path for path, _, _ in self._seen]
        files += [*self._portions, *self._real]
        found = foreign(files, (sys.executable, sys.prefix, *sys.path), environ)
        if found:
            raise RuntimeError(f"{found} is of another version of the code")

    def rehearse(self) -> None:
        """Look as ``check_request`` does, for nothing: what a forked process touches is copied at
        the first touch, which takes longer than the looking."""
        self._check(_AT_REQUEST, time.monotonic())
        try:
            directory = os.getcwd()  # noqa: PTH109
        except OSError:
            return  # it has been removed; the request will name another
        for beside in _beside(self._program, directory):
            self._shadowed(beside)

    def _shadowed(self, directory: str) -> str:
        from importlib import invalidate_caches
        from importlib.machinery import PathFinder

        try:
            there = {entry.partition(".")[0] for entry in os.listdir(directory)}  # noqa: PTH208
        except OSError:
            return ""
        invalidate_caches()
        for name in there.intersection(sys.modules).difference(self._known, _NOT_OURS):
            here = _origin(sys.modules[name])
            if here in ("built-in", "frozen"):
                continue  # found before any directory
            found = PathFinder.find_spec(name, [directory])
            if found is not None and found.loader is not None and found.origin != here:
                return name
        return ""


def different(modules: Iterable[Sequence[str]]) -> str:
    """A module of these pairs of name and origin that has another origin here; '' if none has."""
    for name, origin in modules:
        here = _origin(sys.modules.get(name))
        if isinstance(here, str) and here != origin and name not in _NOT_OURS:
            return name
    return ""


def _beside(program: str, directory: str) -> set[str]:
    """Directories that may become ``sys.path[0]``."""
    if program in NO_FILE:
        return {directory}
    path = os.path.join(directory, program)  # noqa: PTH118
    real = os.path.realpath(path)
    return {real if os.path.isdir(real) else os.path.dirname(p) for p in (path, real)}  # noqa: PTH112, PTH120


def _origin(module: Any) -> Any:
    return getattr(getattr(module, "__spec__", None), "origin", None)


def _files() -> Iterable[tuple[str, str]]:
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if isinstance(path, str):
            yield name, path


def _portions() -> Iterable[str]:
    """The directories of packages that have no file of their own."""
    for module in list(sys.modules.values()):
        spec = getattr(module, "__spec__", None)
        places = getattr(spec, "submodule_search_locations", None)
        if places and not isinstance(getattr(spec, "origin", None), str):
            yield from map(str, places)


def _real(paths: Iterable[str]) -> Iterable[str]:
    """Yield these paths without symbolic links in their folders, where that is another path."""
    folders: dict[str, str] = {}
    for path in paths:
        folder, _, name = path.rpartition("/")
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        if folders[folder] != folder:
            yield f"{folders[folder]}/{name}"


def _stamp(path: str) -> tuple[int, int, int, int]:
    try:
        info = os.stat(path)  # noqa: PTH116
    except OSError:
        return (0, 0, 0, 0)
    return (info.st_mtime_ns, info.st_ctime_ns, info.st_size, info.st_ino)
