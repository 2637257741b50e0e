"""The table of processes in /proc, read as far as a look at a whole node can afford."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping

from health.node import sysfs
from health.node.jobs import UNKNOWN
from health.node.system import System
from robust_slurm.process_stat import ProcessStat, parse

MOST = 10_000  # processes read, the youngest; a fork bomb must not keep the look from ending
MOST_THREADS = 1_000  # of one process
_DEEP = 64  # ancestors of a process that are looked at

SLUID = "s[0-9A-HJKMNP-TV-Z]{13}"  # Slurm's second name of a job, in Crockford's base 32
# cgroup/v2: systemd keeps Slurm's scope right below the slice that cgroup.conf names (CgroupSlice).
# Users own what is below user.slice, and a container's root what is below its scope, machine.slice
# or a directory that is no slice. Several slurmds of a host each have a scope of their own. Who
# may make cgroups within a job's can name them as they like, so only the first one is the job's.
_SCOPE = r"^0::(?!/(?:user|machine)\.slice/)(?:/[^/\n]+\.slice)*/(?:[^/\n]+_)?slurmstepd\.scope/"
_V1 = r"^\d+:[^:\n]+:/slurm(?:_[^/\n]+)?/uid_\d+/"
# cgroup/v1, and v2 up to 25.11 or with CgroupJobIdPaths.
_JOB = re.compile(rf"(?:{_SCOPE}|{_V1})job_(\d+)(?:/|$)", re.MULTILINE)
_SLUID = re.compile(rf"{_SCOPE}({SLUID})(?:/(.*))?$", re.MULTILINE)  # cgroup/v2 from 26.05 on
_DAEMONS = re.compile(r"step_[^/]+/slurm(?:/|$)")  # tasks are in step_X/user
_STEPD = "slurmstepd"
_KEEPER = re.compile(r"[^\0]*slurmstepd[\0 ]infinity[\0 ]*")  # slurmd starts it, cgroup/v2
_TITLE = re.compile(r"slurmstepd: \[(\d+)[.+_]")
_UID = re.compile(r"^Uid:\s*(\d+)", re.MULTILINE)  # the real one
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


def real_uid(system: System, pid: int) -> int:
    """The uid whose process it is, also of one that hides itself; -1: it has ended."""
    found = _UID.search(sysfs.text(system, f"/proc/{pid}/status"))
    return int(found[1]) if found else -1


def account(system: System, uid: int) -> int:
    """The user whose uid this is: also one lent to him for namespaces (subuid(5)); -1: nobody's.

    Otherwise a user could own his files by a thousand uids, each with a limit of its own.
    """
    for line in sysfs.text(system, "/etc/subuid").splitlines():
        name, first, count = [*line.split(":"), "", ""][:3]
        if not (first.isdecimal() and count.isdecimal()):
            continue
        if int(first) <= uid < int(first) + int(count):
            return int(name) if name.isdecimal() else _uid_of(system, name)
    return uid


def _uid_of(system: System, name: str) -> int:
    """The uid of a name of /etc/passwd; -1: it has none there."""
    for line in sysfs.text(system, "/etc/passwd").splitlines():
        fields = line.split(":")
        if fields[0] == name and len(fields) > 2 and fields[2].isdecimal():
            return int(fields[2])
    return -1


def job(cgroup: str) -> int | None:
    """The Slurm job whose number the text of /proc/PID/cgroup has; None: it has none."""
    match = _JOB.search(cgroup)
    return int(match[1]) if match else None


def sluid(cgroup: str) -> str:
    """The SLUID of the Slurm job whose cgroup it is, where Slurm names it so; "" elsewhere."""
    match = _SLUID.search(cgroup)
    return match[1] if match else ""


def stepd_of(name: str, uid: int, title: str) -> int:
    """Job that a slurmstepd serves; only root's daemons count: anybody can set a title. Pure.

    0: it is none, or the one that keeps Slurm's scope for ever and serves no job; -1: it does not
    say of which job it is.
    """
    if name != _STEPD or uid != 0 or _KEEPER.fullmatch(title):
        return 0
    match = _TITLE.match(title)
    return int(match[1]) if match else -1


def daemons_sluid(cgroup: str) -> str:
    """The SLUID of the job whose slurmstepd has this cgroup; "" for a task's: anybody's. Pure."""
    match = _SLUID.search(cgroup)
    return match[1] if match and _DAEMONS.match(match[2] or "") else ""


def own_sluid(env: Mapping[str, str], job: int) -> dict[str, int]:
    """The SLUID that slurmd gave a prolog or epilog for its job, and the job's number. Pure."""
    name = env.get("SLURM_JOB_SLUID", "")
    return {name: job} if job > 0 and re.fullmatch(SLUID, name) else {}


class Jobs:
    """The jobs of processes, by their cgroups.

    A SLUID's number is known from Slurm alone: from slurmd for the job of this prolog or epilog,
    and for the others from their slurmstepds, which are looked up for each SLUID that is not known.
    What a process's environment says of its job proves nothing: its user wrote it.
    """

    def __init__(self, system: System):
        self._system = system
        self._known = own_sluid(system.context.env, system.context.job)

    def of(self, cgroup: str) -> int | None:
        """Return the job; None: no job. UNKNOWN (-1): of a job without a step here."""
        found = job(cgroup)
        name = sluid(cgroup) if found is None else ""
        if not name:
            return found
        if name not in self._known:
            self._known = {name: UNKNOWN} | stepds(self._system) | self._known
        return self._known[name]


def stepds(system: System) -> dict[str, int]:
    """The jobs with a slurmstepd here, by the SLUIDs that name their cgroups."""
    found = {}
    for pid in filter(str.isdigit, sysfs.names(system, "/proc")):
        place = f"/proc/{pid}"
        number = _stepds_job(system, int(pid))
        if number <= 0:
            continue
        mine = daemons_sluid(sysfs.text(system, f"{place}/cgroup"))
        if mine:
            found[mine] = number
    return found


def stepd_above(system: System, pid: int) -> int:
    """The job whose slurmstepd is among the process's ancestors; 0: none, or they have ended."""
    for _ in range(_DEEP):
        process = one(system, pid)
        if process is None or process.parent <= 1:
            return 0
        pid = process.parent
        if _stepds_job(system, pid) > 0:
            return _stepds_job(system, pid)
    return 0


def users(system: System, wanted: int) -> set[int]:
    """The uids of the processes that the slurmstepds of a job have started here."""
    pids = [int(name) for name in sysfs.names(system, "/proc") if name.isdigit()]
    daemons = {pid for pid in pids if _stepds_job(system, pid) == wanted}
    table = [one(system, pid) for pid in pids] if daemons else []
    below = [process.pid for process in table if process and process.parent in daemons]
    return {real_uid(system, pid) for pid in below} - {0, -1}


def _stepds_job(system: System, pid: int) -> int:
    """The job that this process serves as its slurmstepd; 0 or less: none, or not told."""
    name = sysfs.text(system, f"/proc/{pid}/comm")
    if name != _STEPD or real_uid(system, pid) != 0:
        return 0  # to read what a user's process calls itself may hang
    return stepd_of(name, 0, sysfs.text(system, f"/proc/{pid}/cmdline"))


def is_login(cgroup: str) -> bool:
    """True if systemd keeps the process for a person's login (ssh, `systemd --user`)."""
    of_job = job(cgroup) is not None or bool(sluid(cgroup))
    return not of_job and bool(_LOGIN.search(cgroup))


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
