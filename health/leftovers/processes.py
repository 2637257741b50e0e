"""Find and end the processes that a job left behind on this node.

Only processes whose real user is the job's are ever signalled, and of those none that another
program than Slurm started: login sessions and system services (``of_others``). Reading another
process's environment can hang with that process, so all of this runs in a child with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

from health.children.call import call_in_child
from health.node import proctable
from health.node.jobs import UNKNOWN
from health.node.leftover_files import FIRST_USER
from health.node.rootfiles import closing
from robust_slurm import process_stat

PROC = "/proc"
_ENVIRON_LIMIT = 128 << 10  # bytes
_MANAGER = re.compile(r"/user@\d+\.service(?:/|$)")  # systemd --user, also without a login
_SLURM = ("slurmd", "slurmstepd")
_INIT = 1
_THREADS = 1000  # of one process that are looked at
_AGAIN = 4  # looks at all processes beyond the first
_POLL_S = 0.02
_STUCK_EACH_S = 0.3  # for the environment of a process in state D
_STUCK_S = 1.0  # and for all of them in one look


class Process(NamedTuple):
    """``uid`` is the real one; ``start`` (clock ticks since boot) and pid name one process.

    ``job``: the job whose cgroup it is in, the kernel's word, UNKNOWN (-1) for a cgroup that Slurm
    named by a SLUID of which no slurmstepd is here; ``claims``: the job that its
    environment names, its user's word; ``stepd``: the job whose slurmstepd it is, -1 if it is
    one but says not of which. 0: none. ``unit``: the cgroup in which systemd keeps it; "/" for
    all processes of a node without systemd. ``thread``: one that runs, where the main thread has
    ended; ``state`` is that one's. ``ending``: it gives back what it has, and runs no program.
    """

    pid: int
    parent: int
    uid: int
    start: int
    state: str
    name: str
    job: int = 0
    claims: int = 0
    stepd: int = 0
    unit: str = "/"
    thread: int = 0
    ending: bool = False

    @property
    def place(self) -> str:
        """The directory in /proc that says most of it: an ended thread has no memory."""
        return f"{self.pid}/task/{self.thread}" if self.thread else str(self.pid)


def unit_of(cgroup: str) -> str:
    """The path in systemd's own hierarchy, from the text of /proc/PID/cgroup. Pure."""
    paths = {}
    for line in cgroup.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths[controllers] = path
    return paths.get("name=systemd") or paths.get("") or "/"


def claim_of(environ: bytes) -> int:
    """The job that an environment names; 0 if none. Pure."""
    for variable in environ.split(b"\0"):
        name, _, value = variable.partition(b"=")
        if name == b"SLURM_JOB_ID" and value.isdigit() and len(value) <= 10:
            return int(value)
    return 0


def others(processes: Iterable[Process], steps: Iterable[int], job: int, uid: int) -> bool:
    """True if another job on this node belongs, or may belong, to the same user. Pure.

    ``steps``: jobs with steps here as slurmd's spool has them. A job belongs to the users of its
    processes (those in its cgroup, or children of its slurmstepd; their environment proves
    nothing); a job without any may be anybody's.
    """
    listed = list(processes)
    daemons = {p.pid: p.stepd for p in listed if p.stepd}
    owners: dict[int, set[int]] = {other: set() for other in (*daemons.values(), *steps)}
    for p in listed:
        for other in (max(p.job, 0), daemons.get(p.parent, 0)):
            if p.uid != 0 and other in owners:
                owners[other].add(p.uid)
    return any(not of or uid in of for other, of in owners.items() if other != job)


def leftovers(
    processes: Iterable[Process],
    job: int,
    uid: int,
    mode: str,
    alone: bool,
    slurmd: str = "/",
    *,
    named: bool = False,
) -> list[Process]:
    """Processes that the job left behind; for the mode see ``leftovers`` of [epilog]. Pure.

    ``alone``: the user has no other job here; ``slurmd``: the unit that slurmd runs in; ``named``:
    the job's own SLUID is known, so a cgroup of a SLUID without a number is another job's.
    """
    if mode == "never" or uid <= 0:
        return []
    listed = list(processes)
    strangers = of_others(listed)
    # Of a lower uid, which is the system's, "all processes of the user" is too much.
    may_all = alone and uid >= FIRST_USER
    everything = mode == "user" and may_all

    def left(p: Process) -> bool:
        if p.job == UNKNOWN:  # of a job that is over: one before this, or this one if not named
            return everything or (may_all and not named)
        if p.job:  # the kernel's word
            return everything or p.job == job
        if p.pid in strangers or not _may_claim(p.unit, slurmd):
            return False
        return (p.claims == job > 0) or (everything and p.unit == slurmd)

    there = (p for p in listed if p.uid == uid and p.state not in "ZX" and not p.ending)
    return [p for p in there if left(p)]


def _may_claim(unit: str, slurmd: str) -> bool:
    """True if a process in ``unit`` may claim a job; processes of services and logins may not."""
    if unit == slurmd:
        return True
    return bool(_MANAGER.search(unit)) or not unit.startswith(("/system.slice/", "/user.slice/"))


def of_others(processes: Iterable[Process]) -> set[int]:
    """The pids of processes that a program of root's other than Slurm's keeps: sshd, cron. Pure.

    What a job leaves behind has slurmd, a slurmstepd or init above it. The parent of a process
    that came into a container from outside is 0.
    """
    above = {p.pid: p for p in processes}
    return {pid for pid in above if not _slurms(pid, above)}


def _slurms(pid: int, above: dict[int, Process]) -> bool:
    for _ in range(len(above) + 1):  # a parent that ended while it was read may make a circle
        process = above.get(pid)
        if process is None:
            return pid != 0  # it has ended by now, and its children are init's
        if pid == _INIT or (process.uid == 0 and process.name in _SLURM):
            return True
        if process.uid == 0:
            return False
        pid = process.parent
    return False


# -- the machine


def scan(uid: int, known: Mapping[str, int] = MappingProxyType({})) -> list[Process]:
    """List all processes: those of ``uid`` with the jobs they claim, slurmstepds with theirs.

    ``known``: the numbers of jobs by SLUID; those with a slurmstepd here need not be in it.

    A process that ended during the scan, perhaps now a zombie, may have forked another that the
    scan missed: then it is repeated, a few times at most.
    """
    found, gone = _scan(uid, known)
    dead: set[tuple[int, int]] = set()
    for _ in range(_AGAIN):
        before, dead = dead, {(p.pid, p.start) for p in found if p.state in "ZX"}
        if not gone and dead <= before:
            break
        found, gone = _scan(uid, known)
    return found


def _scan(uid: int, known: Mapping[str, int]) -> tuple[list[Process], bool]:
    """Return the processes found, and True if any of them ended during the scan.

    The step daemons are read last: a task that was seen has one that is seen.
    """
    found: list[Process] = []
    stepds: list[int] = []
    named: dict[int, str] = {}  # by place in ``found``: the SLUID of its cgroup
    gone = False
    until = time.monotonic() + _STUCK_S
    for entry in os.listdir(PROC):  # noqa: PTH208
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            process = _identity(pid)
            if process.uid == 0:
                if process.name == "slurmstepd":
                    stepds.append(pid)
                else:
                    found.append(process)
                continue
            cgroup = _cgroup(process)
            job = proctable.job(cgroup) or 0
            if not job and (sluid := proctable.sluid(cgroup)):
                job, named[len(found)] = UNKNOWN, sluid
            claims = _claim(process, until) if process.uid == uid and not job else 0
            found.append(process._replace(job=job, claims=claims, unit=unit_of(cgroup)))
        except (OSError, ValueError):  # gone while it was read
            gone = True
    numbers: dict[str, int] = {}
    for pid in stepds:
        try:
            process = _identity(pid)
            title = _read(pid, "cmdline").decode("utf-8", "replace")
            sluid = proctable.daemons_sluid(_cgroup(process))
        except (OSError, ValueError):
            continue
        stepd = proctable.stepd_of(process.name, process.uid, title)
        found.append(process._replace(stepd=stepd))
        if sluid and stepd > 0:
            numbers[sluid] = stepd
    numbers |= known
    for at, sluid in named.items():
        found[at] = found[at]._replace(job=numbers.get(sluid, UNKNOWN))
    return found, gone


def own_unit() -> str:
    """The unit of this process, which is slurmd's: slurmd starts the epilog and the sweep."""
    return unit_of(_read("self", "cgroup").decode("ascii", "replace"))


def _identity(pid: int) -> Process:
    """The process, of no job yet. OSError or ValueError: it is gone."""
    stat = process_stat.read(pid, PROC)
    state, thread, ending = stat.state, 0, False
    if stat.ending and not stat.ended:
        # Threads that have not begun to end come first, then those in state D.
        left = min(_left(pid), default=(True, state, 0))
        ending, thread = left[0], left[2] if state in "ZX" or not left[0] else 0
        state = left[1] if state in "ZX" else state
    for line in _read(pid, "status").split(b"\n"):
        if line.startswith(b"Uid:"):
            found = Process(pid, stat.parent, int(line.split()[1]), stat.start, state, stat.name)
            return found._replace(thread=thread, ending=ending)
    raise ValueError(pid)


def _left(pid: int) -> Iterator[tuple[bool, str, int]]:
    """The threads of a process that have not ended: whether they are ending, state, number."""
    for thread in os.listdir(f"{PROC}/{pid}/task")[:_THREADS]:  # noqa: PTH208
        try:
            found = process_stat.read(thread, f"{PROC}/{pid}/task")
        except (OSError, ValueError):
            continue
        if found.state not in "ZX":
            yield found.ending, found.state, found.pid


def _cgroup(process: Process) -> str:
    try:
        text = _read(process.place, "cgroup")
    except OSError:
        if not process.thread:
            raise
        text = _read(process.pid, "cgroup")  # that thread has ended meanwhile, others may run
    return text.decode("ascii", "replace")


def _claim(process: Process, until: float) -> int:
    """The job in the process's environment, whose reading may hang if it is stuck in the kernel."""

    def read() -> int:
        try:
            return claim_of(_read(process.place, "environ"))
        except (PermissionError, ProcessLookupError):  # the latter: it has no memory any more
            return 0

    if process.state != "D":
        return read()
    answer, _ = call_in_child(read, max(0.0, min(_STUCK_EACH_S, until - time.monotonic())))
    return int(answer or 0)


def _read(pid: int | str, name: str) -> bytes:
    with closing(os.open(f"{PROC}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)) as fd:
        parts: list[bytes] = []
        size = 0
        while size < _ENVIRON_LIMIT and (part := os.read(fd, 1 << 16)):
            parts.append(part)
            size += len(part)
        return b"".join(parts)


def send(process: Process, number: int) -> bool:
    """Signal exactly this process, whoever has its pid by now; False: it is gone."""
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a kernel before 5.3: the look below and the signal are two steps
        fd = -1
    try:
        if not now(process):
            return False
        if fd < 0:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    finally:
        if fd >= 0:
            os.close(fd)
    return True


def everybodys() -> Iterator[Process]:
    """All processes, without the jobs they are of."""
    for entry in os.listdir(PROC):  # noqa: PTH208
        with contextlib.suppress(OSError, ValueError):  # no process, or gone
            yield _identity(int(entry))


def ending(uid: int, found: Iterable[Process]) -> list[Process]:
    """Return the user's processes that are ending. Whose job they were need not show any more."""
    return [p for p in found if p.uid == uid and p.ending and p.state not in "ZX"]


def now(process: Process) -> Process | None:
    """Return the process as it is now, if a thread of it still runs, as the same user."""
    try:
        found = _identity(process.pid)
    except (OSError, ValueError):
        return None
    same = found.start == process.start and found.uid == process.uid
    return found if same and found.state not in "ZX" else None


def wait_gone(processes: Iterable[Process], until: float) -> list[Process]:
    """Return processes that still run at ``until`` (monotonic seconds); none once all are gone."""
    left = [p for p in processes if now(p)]
    while left and time.monotonic() < until:
        time.sleep(_POLL_S)
        left = [p for p in left if now(p)]
    return left
