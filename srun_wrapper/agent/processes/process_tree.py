"""Looking at and ending process trees through /proc."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from robust_slurm import process_stat

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)
_TICK = os.sysconf("SC_CLK_TCK")
FULL = 0.95  # share of process ids in use that counts as all: root keeps some, some just got free
spared_thread = ""
"""A thread of this process whose children are no rank's, and which waits for them itself."""
_HAS_CHILDREN_FILE = Path(f"/proc/self/task/{os.getpid()}/children").exists()


def become_subreaper() -> None:
    """Make this process adopt all orphans below it, however they detached themselves."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent(signum: int) -> None:
    """Have the kernel send ``signum`` to this process when its parent dies."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def _children_by_scan(pid: int) -> list[int]:
    """Find children on kernels without CONFIG_PROC_CHILDREN, by every process's parent."""
    return [child for child, parent in process_stat.parents().items() if parent == pid]


def children(pid: int) -> list[int]:
    """Direct children of all threads of a process; empty if it is gone."""
    if not _HAS_CHILDREN_FILE:
        return _children_by_scan(pid)
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for tid in threads:
        if tid == spared_thread:
            continue
        try:
            with open(f"/proc/{pid}/task/{tid}/children") as file:
                found += [int(word) for word in file.read().split()]
        except OSError:
            continue
    return found


def descendants(pid: int, spared: Collection[int] = ()) -> list[int]:
    """Return all processes below ``pid``, parents before children, without the ``spared`` trees."""
    found: list[int] = []
    todo = [child for child in children(pid) if child not in spared]
    while todo:
        child = todo.pop()
        found.append(child)
        todo += children(child)
    return found


def send(pids: list[int], signum: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, signum)
        except (ProcessLookupError, PermissionError):
            continue


def end_all(pids: list[int]) -> None:
    send(pids, signal.SIGKILL)


def reap() -> dict[int, int]:
    """Collect all children that have ended: pid -> raw wait status."""
    ended: dict[int, int] = {}
    if spared_thread:  # else the exit codes of its commands would be lost
        for child in children(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(child, os.WNOHANG)
                ended |= {pid: status} if pid else {}
        return ended
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


_left: dict[int, int] = {}  # pid -> start of what this shim's earlier life left behind


def note_left_behind(pids: Collection[int]) -> None:
    """Note processes that this shim, or the one forked next, waits for before its next rank."""
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            _left[pid] = process_stat.read(pid).start


def left_behind() -> bool:
    """True while a noted process has not ended: it may still hold a GPU's memory."""
    for pid, start in list(_left.items()):
        try:
            found = process_stat.read(pid)
        except (OSError, ValueError):
            found = None
        if found is None or found.start != start or found.ended:
            del _left[pid]
    return bool(_left)


def forget_left_behind() -> None:
    """Wait no longer for noted processes."""
    _left.clear()


def no_ids(proc: str = "/proc") -> str:
    """Return what proves that this node has no process id left; "" if it has some.

    A fork that fails with EAGAIN proves nothing: limits of the user or the job do the same.
    """
    try:
        tasks = int(Path(f"{proc}/loadavg").read_text().split()[3].partition("/")[2])
        names = ("pid_max", "threads-max")
        most = min(int(Path(f"{proc}/sys/kernel/{name}").read_text()) for name in names)
    except (OSError, ValueError, IndexError):
        return ""
    full = tasks >= FULL * most
    return f"no process id left on this node ({tasks} tasks of {most})" if full else ""


def _masks(pid: int) -> dict[str, int]:
    """Return the masks of signals that a process handles, ignores and blocks; 0 if it is gone."""
    masks = {"SigCgt": 0, "SigIgn": 0, "SigBlk": 0}
    try:
        with open(f"/proc/{pid}/status") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in masks:
                    masks[name] = int(value, 16)
    except OSError:
        return dict.fromkeys(masks, 0)
    return masks


def handles(pid: int, signum: int) -> bool:
    """True if a process has a handler for a signal; False if the process is gone."""
    return bool(_masks(pid)["SigCgt"] >> (signum - 1) & 1)


def expects(pid: int, signum: int) -> bool:
    """True if a process handles, ignores or blocks a signal; False if the process is gone.

    A mask that blocks even SIGSEGV is not the program's own: the C library blocks all signals for
    a moment while it starts a child. A signal sent then would kill the program a moment later.
    """
    masks = _masks(pid)
    if masks["SigBlk"] >> (signal.SIGSEGV - 1) & 1:
        masks["SigBlk"] = 0
    return any(mask >> (signum - 1) & 1 for mask in masks.values())


def childless(spared: Collection[int] = ()) -> bool:
    """True when this process has no child left, not even an adopted or unreaped one.

    ``spared`` ones do not count.
    """
    if spared:
        found = set(children(os.getpid()))
        if found:
            return found <= set(spared)  # else there are none, or /proc cannot be read
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def tracer_of(pid: int, proc: str = "/proc") -> int:
    """Return the pid of the process that traces this one, as a debugger does; 0 if none does, or
    if it is in another pid namespace."""
    try:
        text = Path(f"{proc}/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    found = re.search(r"^TracerPid:\s*(\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def ended_of(pids: Collection[int]) -> list[int]:
    """Return those of these processes that have ended; a debugger alone reaps what it traces."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):
            if process_stat.read(pid).ended:
                found.append(pid)
    return found


@dataclass(frozen=True, slots=True)
class TreeUsage:
    """Resources that a process tree has used so far."""

    state: str  # the most telling state in it: T, D, R, S; t: stopped by a tracer
    cpu: float  # seconds
    io: int  # bytes read and written through system calls


_TELLING = "TDRStIZX"


def usage(pids: list[int]) -> TreeUsage:
    """Return the sum over processes; ended ones count as nothing. State "" if none is left."""
    ticks = 0
    io = 0
    states = set()
    for pid in pids:
        try:
            process = process_stat.read(pid)
        except (OSError, ValueError):
            continue
        states.add(process.state)
        ticks += process.ticks
        try:
            with open(f"/proc/{pid}/io", "rb") as file:
                for line in file:
                    if line.startswith((b"rchar", b"wchar")):
                        io += int(line.split()[1])
        except OSError:
            continue
    state = next((s for s in _TELLING if s in states), "")
    return TreeUsage(state, ticks / _TICK, io)
