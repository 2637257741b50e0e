"""The files that ranks are writing their state to, seen in /proc.

robust-srun estimates by them what a restart cost where a program's steps are not known. Nothing is
asked of a file system: the path and the position of an open file are the kernel's own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.decide.saved_files import LARGE, saves_state
from srun_wrapper.protocol.messages import RankBeat

EVERY = 5.0  # s between two looks
AGAIN = 30.0  # s until a file that is still written, or again, is reported once more
MOST = 512  # processes of a node that are looked at
MOST_FILES = 16  # in one report
NONE: tuple[str, ...] = ()
_NUMBERED = ("explicit", "regex")  # sources of steps that need no estimate


def being_written(pids: Collection[int]) -> tuple[str, ...]:
    """Return the large checkpoint files that these processes have open for writing."""
    found: dict[str, None] = {}
    for pid in pids:
        base = f"/proc/{pid}"
        try:
            numbers = os.listdir(f"{base}/fd")  # noqa: PTH208 - names are what is wanted
        except OSError:
            continue
        for number in numbers:
            try:
                path = os.readlink(f"{base}/fd/{number}")  # noqa: PTH115 - it is a string
                if not path.startswith("/") or path.startswith(("/dev/", "/proc/", "/memfd:")):
                    continue
                with open(f"{base}/fdinfo/{number}") as file:
                    info = dict(line.split(":", 1) for line in file.read(200).splitlines()[:2])
                position, flags = int(info["pos"]), int(info["flags"], 8)
            except (OSError, KeyError, ValueError):
                continue
            writes = flags & (os.O_WRONLY | os.O_RDWR)
            if writes and position >= LARGE and saves_state(path, position):
                found[path] = None
    return tuple(found)


class WrittenFiles:
    """Looks every ``EVERY`` seconds, in a thread; ``wrote(paths)`` gets what is new.

    ``roots``: pids of the node's shims.
    """

    def __init__(
        self,
        loop: Loop,
        roots: Callable[[], Sequence[int]],
        wrote: Callable[[tuple[str, ...]], None],
    ) -> None:
        self._loop = loop
        self._roots = roots
        self._wrote = wrote
        self._looking = False
        self._next = 0.0
        self._told: dict[str, float] = {}

    def tick(self, beats: Collection[RankBeat]) -> None:
        """Called at every look at the records; looks at the files when it is time."""
        now = time.monotonic()
        if self._looking or now < self._next:
            return
        self._next = now + EVERY
        if beats and all(beat.source in _NUMBERED for beat in beats):
            return
        self._looking, roots = True, self._roots()
        self._loop.run_in_thread(lambda: _look(roots), self._looked, NONE)

    def _looked(self, paths: tuple[str, ...]) -> None:
        self._looking = False
        now = time.monotonic()
        self._told = {path: at for path, at in self._told.items() if now - at < AGAIN}
        fresh = tuple(path for path in paths if path not in self._told)[:MOST_FILES]
        self._told |= dict.fromkeys(fresh, now)
        if fresh:
            self._wrote(fresh)


def _look(roots: Sequence[int]) -> tuple[str, ...]:
    pids = [pid for root in roots for pid in process_tree.descendants(root)]
    return being_written(pids[:MOST])
