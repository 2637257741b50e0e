"""The table of processes in /proc, read as far as a look at a whole node can afford."""

from __future__ import annotations

import contextlib
import re
import time

from health.node import sysfs
from health.node.system import System
from robust_slurm.process_stat import ProcessStat, parse

MOST = 10_000  # processes read, the youngest; a fork bomb must not keep the look from ending
MOST_THREADS = 1_000  # of one process

_JOB = re.compile(r"/job_(\d+)(?:/|$)", re.MULTILINE)  # both cgroup plugins name it so
_LOGIN = re.compile(r"/user\.slice/.*(?:session-[^/]*\.scope|user@\d+\.service)")


def processes(system: System) -> list[ProcessStat]:
    """All processes, the kernel's threads among them; those that end meanwhile are left out."""
    pids = sorted((int(name) for name in system.names("/proc") if name.isdigit()), reverse=True)
    found = (one(system, pid) for pid in pids[:MOST])
    return [process for process in found if process is not None]


def one(system: System, pid: int) -> ProcessStat | None:
    """One process; None: it has ended."""
    try:
        return parse(system.read(f"/proc/{pid}/stat"))
    except (OSError, ValueError):
        return None


def runs(system: System, name: str) -> bool:
    """True if any process has this name, which the kernel cuts at 15 characters.

    Raises OSError for a /proc that cannot be listed: it says of no process that it is not there.
    """
    pids = (pid for pid in system.names("/proc") if pid.isdigit())
    return any(sysfs.text(system, f"/proc/{pid}/comm") == name for pid in pids)


def threads(system: System, process: ProcessStat) -> list[ProcessStat]:
    """Return the threads that are left of a process whose main thread has ended."""
    if process.state not in "ZX" or process.ended:
        return []
    task = f"/proc/{process.pid}/task"
    found = []
    for name in sysfs.names(system, task)[:MOST_THREADS]:
        with contextlib.suppress(OSError, ValueError):  # it has ended
            found.append(parse(system.read(f"{task}/{name}/stat")))
    return [thread for thread in found if thread.state not in "ZX"]


def ending(system: System, process: ProcessStat) -> bool:
    """True for a process that runs no program any more, and gives back what it has."""
    return all(each.ending for each in threads(system, process) or [process])


def pause(system: System, seconds: float) -> None:
    """Wait for another look; a recorded node looks the same every time and has its own pause."""
    getattr(system, "pause", time.sleep)(seconds)


def uid(system: System, process: ProcessStat) -> int:
    """Return its owner (0 for one that hid itself by prctl PR_SET_DUMPABLE); -1: it has ended."""
    try:
        return system.entry(f"/proc/{process.pid}").uid
    except OSError:
        return -1


def job(cgroup: str) -> int | None:
    """The Slurm job that the text of /proc/PID/cgroup places a process in; None: no job."""
    match = _JOB.search(cgroup)
    return int(match[1]) if match else None


def is_login(cgroup: str) -> bool:
    """True if systemd keeps the process for a person's login (ssh, `systemd --user`)."""
    return job(cgroup) is None and bool(_LOGIN.search(cgroup))


def kill_pending(status: str) -> bool:
    """True if SIGKILL was sent and is still pending, by the masks of /proc/PID/status."""
    for line in status.splitlines():
        key, _, value = line.partition(":")
        if key in ("SigPnd", "ShdPnd"):
            try:
                if int(value, 16) & 1 << 8:
                    return True
            except ValueError:
                continue
    return False
