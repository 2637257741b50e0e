"""Stacks of a process by a signal to which it answers itself, where py-spy gives none.

The rank has registered faulthandler for the signal (``robust_slurm.looked``), which needs no lock
of the interpreter. A process without that handler would die of the signal, so it is asked only if
the kernel says that it has one and the file of the answer is open in it.
"""

from __future__ import annotations

import os
import re
import signal
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from robust_slurm.looked import SIGNAL_FROM_LAST, file_name
from srun_wrapper.agent.looking.dumps import DEPTH, MAIN, THREADS, frame_text
from srun_wrapper.agent.looking.kernel import is_writing
from srun_wrapper.agent.processes.process_tree import handles
from srun_wrapper.protocol.looking_messages import ThreadStack

SIGNAL = signal.SIGRTMAX - SIGNAL_FROM_LAST
ANSWER = 0.5  # s for a process to answer
QUIET = 0.03  # s without a new byte after which the answer is whole
MOST = 64 << 10  # bytes of an answer that are read
_THREAD = re.compile(r"(Stack|Current thread|Thread)\b.* \(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


def ask(pid: int, above: Sequence[int], directory: Path) -> tuple[ThreadStack, ...]:
    """Return the stacks that a process writes itself; () if it does not.

    ``above``: the pids of its ancestors, the nearest first; a forked child has its parent's file.
    """
    for owner in (pid, *above):
        for path in directory.glob(f"stacks-{owner}-*"):
            fd = path.name.rpartition("-")[2]
            if fd.isdigit() and path.name == file_name(owner, int(fd)) and _holds(pid, fd, path):
                asked = handles(pid, SIGNAL) and not is_writing(pid)  # it cuts a write short
                return _ask(pid, path) if asked else ()
    return ()


def _holds(pid: int, fd: str, path: Path) -> bool:
    try:
        return Path(f"/proc/{pid}/fd/{fd}").readlink() == path
    except OSError:
        return False


def _ask(pid: int, path: Path) -> tuple[ThreadStack, ...]:
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return ()
        os.ftruncate(fd, 0)
        os.kill(pid, SIGNAL)
        until, size, since = time.monotonic() + ANSWER, 0, time.monotonic()
        while time.monotonic() < until and (not size or time.monotonic() < since + QUIET):
            time.sleep(0.005)
            now = os.fstat(fd).st_size
            if now != size:
                size, since = now, time.monotonic()
        return parse(os.pread(fd, MOST, 0).decode(errors="replace"))
    except OSError:
        return ()
    finally:
        os.close(fd)


def parse(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of faulthandler's text; the one that had the signal, the main, first."""
    threads: list[tuple[bool, list[str]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            threads.append((head[1] != "Thread", []))
        elif threads and (found := _FRAME.match(line)):
            file, number, function = found.groups()
            short = "/".join(file.rsplit("/", 3)[1:]) if "/torch/" in file else Path(file).name
            line_number = int(number) if number.isdigit() and len(number) < 9 else 0
            threads[-1][1].append(frame_text(function, short, line_number))
    threads.sort(key=lambda thread: not thread[0])
    return tuple(
        ThreadStack(MAIN if n == 0 else "", tuple(frames[:DEPTH]))
        for n, (_, frames) in enumerate(threads[:THREADS])
    )
