"""A forked process that may be lost: watched, killed, or left behind when it cannot be killed.

A process that hangs in the kernel (state D: a dead NFS, a wedged driver) takes no signal. So every
wait for a child has a deadline, and a child closes its parent's descriptors: slurmd reads a
prolog's output to its end, which an open descriptor would prevent.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from health.children.kernel_waits import driver, waits_for_others
from health.children.others_wait import others_wait
from robust_slurm import process_stat

NAME = "robust-gate"  # of the child's process: whoever judges processes knows it by this
_PIPE = 3  # the child's end of the pipe
DRIVER = "driver"  # the word in ``where_it_hangs``
OTHERS = "(maybe behind a process that waits for a file server or a user's)"  # as well
_SPARE_S = 2.0  # from the parent's deadline to the child's own alarm


class Child:
    """``fd`` is the read end, non-blocking, of the pipe that ``work`` was given."""

    def __init__(self, pid: int, fd: int):
        self.pid = pid
        self.fd = fd
        self._code: int | None = None

    def read(self) -> bytes:
        """The bytes written so far; empty: the end. Raises BlockingIOError."""
        return os.read(self.fd, 1 << 16)

    def stop(self, grace_s: float = 0.05) -> bool:
        """Kill it and its session. False: it is still there after the grace, left behind."""
        if self._code is None:
            self._kill()
        return self.ended(grace_s) is not None

    def ended(self, grace_s: float) -> int | None:
        """Return its exit code (-N after signal N) within the grace; None: it has not ended.

        What it left of its session is killed before its number is given back to the kernel.
        """
        limit = time.monotonic() + grace_s
        while self._code is None:
            try:
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                if os.waitid(os.P_PID, self.pid, flags):
                    self._kill()
                    self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
                    break
            except ChildProcessError:  # the parent's parent has SIGCHLD ignored
                self._code = 0
                break
            if time.monotonic() >= limit:
                break
            time.sleep(0.001)
        return self._code

    def close(self) -> None:
        os.close(self.fd)

    def _kill(self) -> None:
        for kill in (os.killpg, os.kill):
            try:
                kill(self.pid, signal.SIGKILL)
            except OSError:
                pass


def fork(work: Callable[[int], None], deadline_s: float) -> Child:
    """Run ``work(fd)`` in a child of its own session; what it writes to fd arrives at Child.fd.

    Should the parent die, an alarm ends the child soon after ``deadline_s``.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(read_end)
        os.close(write_end)
        raise
    if pid == 0:
        code = 70
        try:
            _settle(write_end, deadline_s + _SPARE_S)
            work(_PIPE)
            code = 0
        finally:
            os._exit(code)  # whatever was raised: the parent sees the pipe's end and the code
    os.close(write_end)
    os.set_blocking(read_end, False)
    return Child(pid, read_end)


def _settle(write_end: int, alarm_s: float) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    _call_itself(NAME)
    signal.setitimer(signal.ITIMER_REAL, alarm_s)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    if write_end != _PIPE:
        os.dup2(write_end, _PIPE)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        if int(name) > _PIPE:
            try:
                os.close(int(name))
            except OSError:
                pass  # that of the listing itself


def _call_itself(name: str) -> None:
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as file:
            file.write(name)
    except OSError:
        pass  # no /proc


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def where_it_hangs(pid: int) -> str:
    """The kernel's state of a process: "state D in nfs_wait_bit_killable"; best effort.

    With "(driver mlx5_core)" behind it where it hangs in a driver of this node's devices, or with
    OTHERS where it may hang, in a driver or not, because of other processes.
    """
    words = []
    try:
        state = process_stat.read(pid).state
        words.append("state " + state)
        channel = _channel(pid)
        if channel not in ("", "0"):
            words.append("in " + channel)
        stack = _stack(pid)
        module = driver(channel, stack)
        if state == "D" and not waits_for_others(channel, stack) and others_wait():
            words.append(OTHERS)
        elif module:
            words.append(f"({DRIVER} {module})")
    except (OSError, ValueError):
        pass
    return " ".join(words)


def _channel(pid: int) -> str:
    with open(f"/proc/{pid}/wchan", "rb") as file:
        return file.read(256).decode("ascii", "replace").strip()


def _stack(pid: int) -> str:
    """The kernel's part of its stack; "": not readable."""
    try:
        with open(f"/proc/{pid}/stack", encoding="ascii", errors="replace") as file:
            return file.read(1 << 14)
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """The clock tick of its start: with the pid, it names one process. OSError: it has ended."""
    process = process_stat.read(pid)
    if process.ended:
        raise ProcessLookupError(f"process {pid} has ended")
    return str(process.start)
