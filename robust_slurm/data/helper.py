"""The data process and its readers are helpers, which no signal for ranks ends."""

from __future__ import annotations

import contextlib
import ctypes
import io
import signal
import sys

_SIGNALS = ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "ALRM")
_NAME, _DEATH = 15, 1  # PR_SET_NAME, PR_SET_PDEATHSIG
_ARENAS = -8  # M_ARENA_MAX


def become_helper(name: str, score: int) -> None:
    """Take a name in the process list, be the kernel's choice before ranks when memory is short,
    and ignore what Slurm sends to all processes of a step."""
    for each in _SIGNALS:  # handlers, not SIG_IGN, which children would inherit
        signal.signal(getattr(signal, "SIG" + each), lambda _number, _frame: None)
    ctypes.CDLL(None).prctl(_NAME, name.encode(), 0, 0, 0)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < score:
            file.seek(0)
            file.write(str(score))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # it is killed in the end


def end_with_parent() -> None:
    """Be killed when the thread that has started this process ends."""
    ctypes.CDLL(None).prctl(_DEATH, signal.SIGKILL, 0, 0, 0)


def trim_heaps() -> None:
    """Have glibc give back what is free in its heaps: by itself it gives back only their ends."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def use_one_heap() -> None:
    """Have glibc make no heap for each thread: what many short threads free would not be used
    again. Another C library has no such choice."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_ARENAS, 1)
