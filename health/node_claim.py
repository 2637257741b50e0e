"""The claim of an active test on its node: one run at a time, and none that is in a job's way.

A file in the gate's spool is locked by the process that tests, and names it. A prolog that starts
meanwhile ends that process before its checks (``give_way``). Every prolog imports this file, so
it imports nothing of the tests.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from health.children.child import start_time
from health.node import rootfiles

LOCK = "active.lock"
GIVE_WAY_S = 5.0  # for a killed process to give the GPUs' memory back
_TICK_S = 0.02


def claim(spool: str) -> int:
    """Claim this node for a test; return a descriptor. BlockingIOError: it is claimed. OSError."""
    with rootfiles.closing(rootfiles.open_dir(spool)) as directory:
        held = rootfiles.lock(directory, LOCK, wait=False)
    if not _ended(held, time.monotonic() + GIVE_WAY_S):
        os.close(held)
        raise BlockingIOError(errno.EBUSY, "an earlier test cannot be stopped")
    os.ftruncate(held, 0)
    return held


@contextmanager
def claimed(spool: str) -> Iterator[None]:
    """Claim the node for tests that a person starts; ``give_way`` then ends this process.

    Does nothing where no gate has ever run. BlockingIOError: another run tests the node. OSError.
    """
    try:
        held = claim(spool)
    except FileNotFoundError:
        yield
        return
    try:
        noted(held)(os.getpid())
        yield
    finally:
        os.ftruncate(held, 0)
        os.close(held)


def noted(held: int) -> Callable[[int], None]:
    """Return the function that writes the process that tests into a claim."""

    def note(pid: int) -> None:
        try:
            born = start_time(pid)
        except (FileNotFoundError, ProcessLookupError):
            return  # it has ended already
        os.pwrite(held, f"{pid} {born}\n".encode(), 0)

    return note


def give_way(spool: str) -> str:
    """Before a job starts, end a test that runs here; return why it failed or "". Never raises."""
    until = time.monotonic() + GIVE_WAY_S
    try:
        fd = rootfiles.open_in(spool, LOCK)
    except OSError:
        return ""  # nothing has ever run here
    try:
        while not _is_free(fd):
            _end(os.pread(fd, 64, 0))
            if time.monotonic() > until:
                return f"an active test did not exit within {GIVE_WAY_S:g} s"
            time.sleep(_TICK_S)
        if not _ended(fd, until):
            return f"an abandoned active test did not exit within {GIVE_WAY_S:g} s"
    except OSError as error:
        return f"an active test could not be stopped: {error_text(error)}"
    finally:
        os.close(fd)
    return ""


def _is_free(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ended(held: int, until: float) -> bool:
    """End the noted process and its workers, while holding the claim; False: some still run.

    The former holder may have been killed, which frees the claim but ends no test.
    """
    left = _end(os.pread(held, 64, 0))
    while left := {pid: born for pid, born in left.items() if _is(pid, born)}:
        if time.monotonic() > until:
            return False
        time.sleep(_TICK_S)
    return True


def _end(note: bytes) -> dict[int, str]:
    """Kill the noted process, if it is still the same one, and its workers, with their sessions.

    Return what was killed: pids with their start times.
    """
    from health.children.orphans import children_of

    words = note.decode("ascii", "replace").split()
    if len(words) != 2 or not words[0].isdigit() or not _is(int(words[0]), words[1]):
        return {}  # about to start, or it has ended by itself
    killed = {}
    for pid in (int(words[0]), *children_of(int(words[0]))):
        try:
            killed[pid] = start_time(pid)
            os.kill(pid, signal.SIGKILL)
            os.killpg(pid, signal.SIGKILL)  # if it leads one
        except OSError:
            pass  # it has ended, or leads none
    return killed


def _is(pid: int, born: str) -> bool:
    try:
        return start_time(pid) == born
    except OSError:
        return False


def error_text(error: OSError) -> str:
    """Return an error as text, with the file it is about."""
    where = f"{error.filename}: " if error.filename else ""
    return f"{where}{error.strerror or error}"
