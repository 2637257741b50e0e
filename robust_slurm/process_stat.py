"""The parser of /proc/PID/stat (proc_pid_stat(5)). Python 3.9 syntax."""

from __future__ import annotations

import os
from typing import NamedTuple

PF_EXITING = 0x4  # include/linux/sched.h
PF_KTHREAD = 0x200000
_FIELDS = 52
_THREADS = 17  # their number, in ``fields``


class ProcessStat(NamedTuple):
    """The part of the line that we need."""

    pid: int
    name: str
    state: str  # R, S, D, Z, T, I, …
    parent: int
    flags: int
    ticks: int  # clock ticks of processor time, user and system
    start: int  # clock ticks since boot: with the pid, it names one process
    fields: tuple[str, ...]  # all that follows the name: fields[0] is field 3 of the manual page

    @property
    def ended(self) -> bool:
        """True for a zombie without any other thread, whose memory is given back.

        Where only the main thread has ended, another may run on, or give back what the process
        had on a GPU: 0.2 s after SIGKILL, and longer the more it had.
        """
        return self.state in "ZX" and int(self.fields[_THREADS]) <= 1

    @property
    def ending(self) -> bool:
        """True for a thread that has begun to end: it runs no program any more."""
        return bool(self.flags & PF_EXITING)

    @property
    def kernel(self) -> bool:
        return bool(self.flags & PF_KTHREAD)


def parse(line: str) -> ProcessStat:
    """Parse a line. Raises ValueError. The name may hold anything, closing brackets too."""
    pid, _, rest = line.partition(" (")
    name, bracket, tail = rest.rpartition(") ")
    fields = tuple(tail.split(maxsplit=_FIELDS))
    if not bracket or len(fields) < 20:
        raise ValueError("no line of /proc/PID/stat")
    ticks = int(fields[11]) + int(fields[12])
    parent, flags, start = int(fields[1]), int(fields[6]), int(fields[19])
    return ProcessStat(int(pid), name, fields[0], parent, flags, ticks, start, fields)


def read(pid: int | str, proc: str = "/proc") -> ProcessStat:
    """Read the stat of a process. Raises OSError or ValueError if it has ended."""
    with open(f"{proc}/{pid}/stat", "rb") as file:
        return parse(os.fsdecode(file.read(4096)))


def parents() -> dict[int, int]:
    """Map the pid of every process to its parent's; those that end meanwhile are left out."""
    found = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit():
            try:
                found[int(name)] = read(name).parent
            except (OSError, ValueError):
                continue
    return found
