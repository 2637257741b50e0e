"""Adopt and end the processes that a killed program of ours leaves behind.

For a program that starts processes in sessions of their own, which a kill of its group misses.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from robust_slurm import process_stat

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER, linux/prctl.h
_TICK_S = 0.01


@contextmanager
def adopted(patience_s: float) -> Iterator[None]:
    """Inside, orphans of our children become children of ours; at the end they are killed.

    Whatever does not die within ``patience_s`` is left behind. For a process of one thread.
    """
    before = children_of(os.getpid())
    prctl = ctypes.CDLL(None).prctl
    prctl(_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        until = time.monotonic() + patience_s
        while (left := children_of(os.getpid()) - before) and time.monotonic() < until:
            for pid in left:
                _end(pid)
            time.sleep(_TICK_S)
        prctl(_SUBREAPER, 0, 0, 0, 0)


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass


def children_of(parent: int) -> set[int]:
    """Return its children, those included that have ended and nobody waited for."""
    return {pid for pid, of in process_stat.parents().items() if of == parent}
