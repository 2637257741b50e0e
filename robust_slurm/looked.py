"""Lets robust-task see where this process is, when the job makes no step.

robust-task runs py-spy. Where Yama restricts ptrace (kernel.yama.ptrace_scope = 1, as on Ubuntu) a
process can be read by its ancestors and by whoever it names itself: py-spy is no ancestor of the
rank, so the rank names robust-task, and each child that it forks does so again. Where py-spy
returns nothing, robust-task sends a signal to which faulthandler answers with all stacks, in C and
without the interpreter's lock.

Runs in the rank: standard library only, Python 3.9 syntax. Whatever fails here, the rank goes on.
"""

from __future__ import annotations

import os

SHIM = "ROBUST_SHIM"
"""Variable with the pid of robust-task."""
SCOPE = "/proc/sys/kernel/yama/ptrace_scope"
SIGNAL_FROM_LAST = 5  # the signal's distance from SIGRTMAX
_PR_SET_PTRACER = 0x59616D61
_hooked = False
_answers = 0
"""Pid of the process that has registered its answer."""


def file_name(pid: int, fd: int) -> str:
    """The file for a process's answer; ``fd``: its descriptor there, for robust-task to check."""
    return f"stacks-{pid}-{fd}"


def allow() -> None:
    """Let robust-task and what it starts read this process and the children that it forks."""
    global _hooked
    if not _name_shim() or _hooked:
        return
    _hooked = True
    os.register_at_fork(after_in_child=_name_shim)


def _name_shim() -> bool:
    """Name robust-task to Yama. False if it was not: no Yama, another scope, or an error."""
    try:
        with open(SCOPE, "rb") as file:
            if file.read().strip() != b"1":
                return False
        import ctypes

        shim = int(os.environ[SHIM])
        ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(shim), 0, 0, 0)
    except Exception:  # noqa: BLE001 - then robust-task says that py-spy was refused
        return False
    return True


def answer(directory: str) -> None:
    """Have faulthandler answer the signal, unless the program has a handler of it."""
    global _answers
    if _answers == os.getpid() or SHIM not in os.environ:
        return
    _answers = os.getpid()
    try:
        import faulthandler

        _signal = __import__("_signal")  # signal itself imports enum
        number = _signal.SIGRTMAX - SIGNAL_FROM_LAST
        if _signal.getsignal(number) != _signal.SIG_DFL:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW
        path = f"{directory}/.stacks-{os.getpid()}"
        fd = os.open(path, flags, 0o600)
        os.rename(path, f"{directory}/{file_name(os.getpid(), fd)}")  # noqa: PTH104
        # Not all threads: their frames change while they run, and reading those can crash.
        faulthandler.register(number, file=fd, all_threads=False)
    except Exception:  # noqa: BLE001 - then there is py-spy alone
        return
