"""A look at all threads of the node: whether any waits for a file server or a user's own doing.

It may hold what a process in a driver waits for (``kernel_waits``). Nothing here can hang.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

from health.children.kernel_waits import waits_for_server, waits_for_user

MOST_THREADS = 1_000  # of one process
_LOOK_S = 1.0  # some 30,000 threads


def _names(path: str) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208
    except OSError:
        return []  # no process any more


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 12).strip()
    except OSError:
        return ""


def others_wait(
    names: Callable[[str], list[str]] = _names, text: Callable[[str], str] = _text
) -> bool:
    """Return True if any thread waits so, or if there are too many to know.

    ``names`` and ``text`` list a directory and read a file, of a recorded node as well.
    """
    until = time.monotonic() + _LOOK_S
    for place in _threads(names):
        channel = text(f"{place}/wchan")
        if waits_for_user(channel):
            return True
        # The file systems' own kernel threads wait in such functions while they are idle, not in D.
        if waits_for_server(channel, "") and _in_d(text(f"{place}/stat")):
            return True
        if time.monotonic() > until:
            return True
    return False


def _threads(names: Callable[[str], list[str]]) -> Iterator[str]:
    for pid in names("/proc"):
        if pid.isdigit():
            threads = names(f"/proc/{pid}/task")[:MOST_THREADS]
            yield from (f"/proc/{pid}/task/{thread}" for thread in threads)


def _in_d(stat: str) -> bool:
    return stat.rpartition(")")[2].split()[:1] == ["D"]
