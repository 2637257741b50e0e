"""The needs of slurmd itself: its spool directory, munge, and a name that others reach.

slurmd calls the gate: if both disagree about a path, slurmd is right. So a file that is not where
the gate looks for it is not enough for a FAIL.
"""

from __future__ import annotations

import errno
import posixpath

from health.check import Check, Condition, Setting
from health.finding import Finding, Status
from health.node import jobs, proctable, slurmconf, sysfs
from health.node.kernlog import killed_for_memory
from health.node.sysfs import text
from health.node.system import PROBE_NOT_STARTED, System

SPOOL = Condition(
    "slurmd-spool",
    "FAIL",
    "node",
    "none",
    "no file can be written in SlurmdSpoolDir; class user if there is no space, or it only takes "
    "too long; WARN if that is while a job runs",
)
GONE = Condition(
    "slurmd-gone", "WARN", "node", "none", "SlurmdPidFile names a process that is not slurmd"
)
MUNGE_MISSING = Condition(
    "munge-missing",
    "FAIL",
    "node",
    "none",
    "Slurm uses munge, and its socket (AuthInfo) is missing; WARN in munge's default directory",
)
MUNGE_DEAD = Condition(
    "munge-dead",
    "FAIL",
    "node",
    "none",
    "munged has exited and left its socket and pid file; class user if the kernel killed it "
    "because memory ran out",
)
LOOPBACK = Condition(
    "hostname-loopback",
    "WARN",
    "node",
    "none",
    "/etc/hosts gives the node's name a loopback address: ranks pass it on to other nodes",
)

MUNGE_SOCKETS = ("/run/munge/munge.socket.2", "/var/run/munge/munge.socket.2")
_PROBE_S = 2.0


def munge_socket(values: dict[str, str]) -> str:
    """AuthInfo's socket=PATH; "" where it names none (then it is munge's own default)."""
    for part in values.get("authinfo", "").split(","):
        key, _, value = part.strip().partition("=")
        if key.lower() == "socket":
            return value
        if part.startswith("/"):
            return part  # the old form: the path alone
    return ""


def uses_munge(values: dict[str, str]) -> bool:
    return values.get("authtype", "auth/munge").lower() == "auth/munge"


def loopback_only(hosts: str, node: str) -> str:
    """The loopback address that /etc/hosts gives the name, if it gives no other one."""
    addresses = []
    for line in hosts.splitlines():
        fields = line.partition("#")[0].split()
        if node in fields[1:]:
            addresses.append(fields[0])
    loop = [a for a in addresses if a.startswith("127.") or a == "::1"]
    return loop[0] if loop and len(loop) == len(addresses) else ""


def _run(system: System) -> list[Finding]:
    conf = slurmconf.load(system)
    found = []
    if conf.path:
        found += _spool(system, slurmconf.spool_dir(system))
        found += _munge(system, conf.values) if uses_munge(conf.values) else []
        found += _daemon(system, conf) if system.context.where == "deep" else []
    address = loopback_only(text(system, "/etc/hosts"), system.context.node)
    if address:
        said = f"/etc/hosts: {system.context.node} is {address}"
        found.append(LOOPBACK.found(said))
    return found


def _spool(system: System, path: str) -> list[Finding]:
    try:
        system.probe(path, True, _PROBE_S)
    except OSError as error:
        if error.errno in PROBE_NOT_STARTED:
            raise
        if error.errno == errno.ENOENT:
            return []  # slurmd makes it when it starts: it has another one
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            said = f"{path}: no space left"
        else:
            said = f"{path}: {error.strerror or error}"
        # The running job's own I/O may keep that disk busy: a free node is asked again.
        slow = isinstance(error, TimeoutError)
        busy = slow and bool(jobs.running(system))
        theirs = slow or error.errno in (errno.ENOSPC, errno.EDQUOT)
        status: Status | None = "WARN" if busy else None
        return [SPOOL.found(said, status=status, cls="user" if theirs else None)]
    return []


def _munge(system: System, values: dict[str, str]) -> list[Finding]:
    given = munge_socket(values)
    for path in (given,) if given else MUNGE_SOCKETS:
        directory = posixpath.dirname(path)
        try:
            kind = system.entry(path).kind
        except FileNotFoundError:
            if given:
                return [MUNGE_MISSING.found(f"no socket {path} (AuthInfo)")]
            # munge may have been built with another path
            if sysfs.kind(system, directory) == "dir":
                return [MUNGE_MISSING.found(f"no socket {path}", status="WARN")]
            continue
        except OSError:
            return []
        if kind == "socket":
            return _munged(system, path, f"{directory}/munged.pid")
    return []


def _munged(system: System, socket: str, pid_file: str) -> list[Finding]:
    """A killed munged leaves its socket; its pid file says who it was.

    Where systemd is not the first process this may be a container, and munged in another one.
    """
    pid = text(system, pid_file)
    if not pid.isdigit() or text(system, "/proc/1/comm") != "systemd":
        return []
    if text(system, f"/proc/{pid}/comm") == "munged":
        return []
    try:
        if proctable.runs(system, "munged"):
            return []
    except OSError:  # a /proc that cannot be listed says nothing about munged
        return []
    theirs = killed_for_memory(system, "munged", pid)
    said = f"{socket} is there, but process {pid} of {pid_file} is gone"
    if theirs:
        said += "; memory ran out, and the kernel killed it"
    return [MUNGE_DEAD.found(said, cls="user" if theirs else None)]


def _daemon(system: System, conf: slurmconf.Conf) -> list[Finding]:
    node = system.context.node
    path = conf.values.get("slurmdpidfile", "/var/run/slurmd.pid")
    pid = text(system, path.replace("%n", node).replace("%h", node))
    if not pid.isdigit() or text(system, f"/proc/{pid}/comm").startswith("slurmd"):
        return []
    return [GONE.found(f"{path} says {pid}, which is not slurmd")]


SETTINGS: dict[str, Setting] = {}
CHECK = Check(
    name="slurmd",
    run=_run,
    conditions=(SPOOL, GONE, MUNGE_MISSING, MUNGE_DEAD, LOOPBACK),
    settings=SETTINGS,
    closes_on_error=False,
    deadline_s=3.0,
    cost_ms=2.5,
)
