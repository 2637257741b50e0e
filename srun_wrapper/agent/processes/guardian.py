"""The guardian of a shim: a process that outlives it, and starts it once more.

That a shim dies (out of memory, SIGKILL, an error of ours) says nothing about its node. The process
that Slurm has started stays as the guardian and does nothing but wait; the shim is its child. It
is forked before there are threads, shares its memory with the shim, and ends as the shim ends.
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

from robust_slurm.memory_dir import LOCAL, remove_stale
from srun_wrapper.agent.processes import process_tree

STEADY = 300.0  # s after which a shim that has died before is started once more again
CLEAN = 1.0  # s for what a dead shim has left to end
KILLED_TOO = 0.05  # s for whoever has killed the shim (Slurm, at the step's end) to kill us, too
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
    """Run ``life(number)`` in a child, and once more when it dies without an exit of its own.

    It returns the exit code and the signal to end with, and ``end`` ends a process so. ``name``:
    of the shim, for messages.
    """
    process_tree.become_subreaper()
    own = Path("/proc/self/comm").read_bytes().strip()
    _call_us(NAME)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_OURS)
    number, again = 0, 0.0  # ``again``: from when on it may be started once more
    while True:
        status, told = _live(life, end, number, own, mask)
        code = os.waitstatus_to_exitcode(status)
        if told == _FINISHED:
            break
        _clean_up()
        time.sleep(KILLED_TOO)
        number += 1
        if told == _RESTART:
            continue
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
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
    """The guardian has another name than the shim, for people who look at processes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name, 0, 0, 0)


def _live(
    life: Callable[[int], tuple[int, int]],
    end: Callable[[int, int], NoReturn],
    number: int,
    own: bytes,
    mask: Collection[int],
) -> tuple[int, bytes]:
    """One life of the shim: its wait status, and its last word."""
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
        ended, status = os.waitpid(-1, 0)
        if ended == pid:
            break
    os.set_blocking(finished, False)  # a process that it has left may hold the other end
    try:
        told = os.read(finished, 1)
    except BlockingIOError:
        told = b""
    os.close(finished)
    return status, told


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
    for base in LOCAL:
        remove_stale(base)


def _say(text: str) -> None:
    try:
        os.write(2, f"robust-task: {text}\n".encode())
    except OSError:
        pass
