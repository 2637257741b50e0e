"""The guardian of a shim: its parent process, which restarts it when it dies.

The death of a shim (out of memory, SIGKILL, an error of ours) says nothing about its node. The
process that Slurm started remains as the guardian and only waits. It forks the shim while it has
no threads, shares its memory with the shim, and ends with the shim's exit code or signal. It
continues a shim that stays stopped: its ranks would block on their output, and could not end.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NoReturn

from robust_slurm import process_stat
from robust_slurm.memory_dir import LOCAL, remove_stale
from robust_slurm.text import signal_name
from srun_wrapper.agent.processes import process_tree

STEADY = 300.0  # s; a shim that dies again within this time is not restarted
STOPPED = 10.0  # s that a shim may stay stopped (SIGSTOP) while its guardian runs
LOOK = 0.1  # s between two looks whether it still is
CLEAN = 1.0  # s for what a dead shim left behind to end; then only its ranks wait for it
KILLED_TOO = 0.05  # s for the killer of the shim (Slurm, at the step's end) to kill us, too
NAME = b"robust-guard"
_PR_SET_NAME = 15
_FINISHED, _RESTART = b"f", b"r"  # the last words of a shim; one that dies has none
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT}
_NOT_OURS = signal.valid_signals() - _FAULTS
"""Signals for the shim, which the guardian blocks."""


class Restart(Exception):
    """Raised by a shim that wants to be started anew: its node's agent has died."""


def guarded(
    life: Callable[[int], tuple[int, int]], end: Callable[[int, int], NoReturn], name: str
) -> NoReturn:
    """Run ``life(number)`` in a child, and once more if the child dies before it has finished.

    ``life`` returns the exit code and the signal to end with; ``end`` ends a process with them.
    ``name``: the shim's, for messages.
    """
    process_tree.become_subreaper()
    own = Path("/proc/self/comm").read_bytes().strip()
    _call_us(NAME)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
    number, again = 0, 0.0  # ``again``: a death before this time is not followed by a restart
    while True:
        status, told = _live(life, end, number, own, mask, name)
        code = os.waitstatus_to_exitcode(status)
        if told == _FINISHED:
            break
        _clean_up()
        time.sleep(KILLED_TOO)
        number += 1
        if told == _RESTART:
            continue
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with {code}"
        if time.monotonic() < again:
            _say(f"{name} {how} again; the node is evicted")
            break
        again = time.monotonic() + STEADY
        _say(f"{name} {how}; restarting it")
    while signal.sigtimedwait(_NOT_OURS, 0):
        pass  # it was for the shim
    if code < 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
    end(max(code, 0), max(-code, 0))


def _call_us(name: bytes) -> None:
    """Set this process's name, so that ps shows which is the guardian and which the shim."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _live(
    life: Callable[[int], tuple[int, int]],
    end: Callable[[int, int], NoReturn],
    number: int,
    own: bytes,
    mask: Collection[int],
    name: str,
) -> tuple[int, bytes]:
    """Run the shim once; return its wait status and its last word."""
    gc.freeze()  # the pages stay shared
    finished, tell = os.pipe()
    guardian = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(finished)
        _call_us(own)
        process_tree.die_with_parent(signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _shim(life, end, number, tell)
    os.close(tell)
    while True:
        ended, status = os.waitpid(-1, os.WUNTRACED)
        if ended == pid and os.WIFSTOPPED(status):
            _continue(pid, name)
        elif ended == pid:
            break
    os.set_blocking(finished, False)  # a process that the shim left may hold the other end
    try:
        told = os.read(finished, 1)
    except BlockingIOError:
        told = b""
    os.close(finished)
    return status, told


def _continue(pid: int, name: str) -> None:
    """Continue a shim that was stopped, unless whoever stopped it does so himself in time."""
    until = time.monotonic() + STOPPED
    while process_stat.read(pid).state == "T":
        if time.monotonic() >= until:
            _say(f"{name} was stopped for {STOPPED:g} s (SIGSTOP); continuing it")
            os.kill(pid, signal.SIGCONT)
            return
        time.sleep(LOOK)


def _shim(
    life: Callable[[int], tuple[int, int]],
    end: Callable[[int, int], NoReturn],
    number: int,
    tell: int,
) -> NoReturn:
    try:
        code, signum = life(number)
    except Restart:
        os.write(tell, _RESTART)
        os._exit(1)
    except BaseException:  # noqa: BLE001 - it must never get out of here, into the guardian's code
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os.write(tell, _FINISHED)
    end(code, signum)


def _clean_up() -> None:
    """End what is left of the shim's ranks, and remove what it kept in memory."""
    until = time.monotonic() + CLEAN
    while time.monotonic() < until:
        process_tree.end_all(process_tree.descendants(os.getpid()))
        process_tree.reap()
        if process_tree.childless():
            break
        time.sleep(0.005)
    # The new shim, which a fork of this process becomes, has its first rank wait for these.
    process_tree.note_left_behind(process_tree.descendants(os.getpid()))
    for base in LOCAL:
        remove_stale(base)


def _say(text: str) -> None:
    try:
        os.write(2, f"robust-task: {text}\n".encode())
    except OSError:
        pass
