"""Processes: stuck in the kernel, left behind by jobs that ended, or too many.

Reading every process takes some ms on a large node. So the prolog does it only if the load shows
that a process runs or is stuck although no job should; epilog and sweep always do it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from itertools import islice

from health.check import Check, Condition, Setting
from health.children.child import NAME
from health.children.kernel_waits import driver, waits_for_server
from health.children.others_wait import others_wait
from health.finding import Finding
from health.node import jobs, proctable
from health.node.leftover_files import FIRST_USER
from health.node.stuck import left_behind
from health.node.sysfs import names, number, text
from health.node.system import System
from robust_slurm.process_stat import ProcessStat
from robust_slurm.text import counted

STUCK = Condition(
    "process-stuck",
    "FAIL",
    "node",
    "reboot",
    "a killed process of no running job does not exit (state D) and hangs in a driver of this "
    "node's devices; class user and action none if that is not proven: its wait may be for a file "
    "server or a user's FUSE daemon, or for a lock that such a wait holds",
)
BLOCKED = Condition(
    "process-blocked",
    "WARN",
    "node",
    "none",
    "a process of no running job stays in state D but has not been killed",
)
LEFT = Condition(
    "processes-left",
    "WARN",
    "user",
    "clear-leftovers",
    "users' processes on a node without jobs; FAIL in the epilog for those in the job's cgroup",
)
LOAD = Condition("idle-load", "WARN", "user", "none", "load on a node without jobs")
ZOMBIES = Condition("zombies", "WARN", "node", "none", "init does not reap its dead children")
EXHAUSTED = Condition(
    "tasks-exhausted", "FAIL", "user", "clear-leftovers", "95 % of all process ids are in use"
)
MANY = Condition("tasks-many", "WARN", "user", "none", "80 % of all process ids are in use")

LOOK_AT = 0.9  # load over 1 and over 5 minutes: one process that runs or is stuck all the time
PAUSE_S = 0.3  # between two looks at a process in state D
PATIENCE_S, PROLOG_PATIENCE_S = 6.0, 3.0  # for one that was killed
ZOMBIE_LIMIT = 50
NAMED = 3  # processes named in evidence

# Dynamic users of systemd services (systemd.io/UIDS-GIDS), and nobody.
_SERVICES = range(61184, 65520)
_NOBODY = 65534


def judge_count(tasks: int, limit: int | None) -> list[Finding]:
    """Tasks against the number of ids that there are."""
    if not limit or tasks < 0.8 * limit:
        return []
    condition = EXHAUSTED if tasks >= 0.95 * limit else MANY
    return [condition.found(f"{tasks} tasks of {limit} (kernel.pid_max, threads-max)")]


def judge_zombies(found: Iterable[ProcessStat]) -> list[Finding]:
    orphans = [p for p in found if p.ended and p.parent == 1]
    if len(orphans) <= ZOMBIE_LIMIT:
        return []
    return [ZOMBIES.found(f"{len(orphans)} dead children of init, limit {ZOMBIE_LIMIT}")]


def _run(system: System) -> list[Finding]:
    loads = text(system, "/proc/loadavg").split()
    if len(loads) < 4:
        return []
    one, five = float(loads[0]), float(loads[1])
    active, _, tasks = loads[3].partition("/")
    limits = [
        number(system, "/proc/sys/kernel/pid_max"),
        number(system, "/proc/sys/kernel/threads-max"),
    ]
    found = judge_count(int(tasks), min((n for n in limits if n), default=None))
    loaded = one >= LOOK_AT and five >= LOOK_AT
    if system.context.where == "prolog" and not loaded:
        return found
    busy = jobs.running(system)
    table = proctable.processes(system)
    found += judge_zombies(table)
    ours = [p for p in table if not p.kernel and p.state != "Z"]
    threads = ((thread, p) for p in table for thread in proctable.threads(system, p))
    rest = list(islice(threads, proctable.MOST))
    sleeping = [(p, main) for p, main in (*((p, p) for p in ours), *rest) if p.state == "D"]
    if sleeping:
        lost, gate = left_behind(system), _gate(system)
        sleeping = [
            (p, main)
            for p, main in sleeping
            if (main.pid, main.start) not in lost
            and main.parent not in gate
            and not _gates(system, main)
        ]
    owners = proctable.Jobs(system)
    found += _blocked(system, sleeping, busy, owners)
    if busy is not None:
        found += _left(system, ours, busy, owners)
    if busy == frozenset():
        found += _load(system, ours, one, int(active))
    return found


def _gate(system: System) -> set[int]:
    """The processes of this run of the gate that may have children.

    If one of its children hangs, the check that started that child reports it.
    """
    try:
        me = proctable.one(system, int(system.link("/proc/self")))
    except (OSError, ValueError):
        me = None
    return {me.pid, me.parent} - {1} if me else set()


def _gates(system: System, process: ProcessStat) -> bool:
    """True for a child of any run of the gate, which that run reported if it had to be."""
    return process.name == NAME and proctable.real_uid(system, process.pid) == 0


def _blocked(
    system: System,
    sleeping: list[tuple[ProcessStat, ProcessStat]],
    busy: frozenset[int] | None,
    owners: proctable.Jobs,
) -> list[Finding]:
    """Report processes of no running job that are in state D at every look.

    A job's own may wait for I/O. A killed process gets time to exit: freeing a GPU's memory takes
    seconds. ``sleeping``: each with its process, from which a thread differs that outlives the main
    one. That is a warning but in the sweep: after a job several may give back much for long.
    """
    mains = {p.pid: main for p, main in sleeping if p is not main}
    sweep = system.context.where == "sweep"
    still = [p for p, _ in sleeping if _ownerless(system, p, busy, owners)]
    patience = PROLOG_PATIENCE_S if system.context.where == "prolog" else PATIENCE_S
    looks = round(patience / PAUSE_S)
    while still and looks:
        proctable.pause(system, PAUSE_S)
        looks -= 1
        still = [
            now
            for p in still
            if (now := proctable.one(system, p.pid)) and (now.state, now.start) == ("D", p.start)
        ]
        if not any(_killed(system, p) for p in still):
            break
    bad, waiting, theirs = [], [], []
    uids = Counter[int]()
    others = cache(partial(others_wait, partial(names, system), partial(text, system)))
    for process in still:
        channel = text(system, f"/proc/{process.pid}/wchan")
        stack = text(system, f"/proc/{process.pid}/stack")
        main = mains.get(process.pid)
        of = f", a thread of {main.pid} ({_printable(main.name)})," if main else ""
        said = f"{process.pid} ({_printable(process.name)}){of} in {channel or 'the kernel'}"
        if busy is None or not _killed(system, process) or (main and not sweep):
            waiting.append(said)
            continue
        where = driver(channel, stack)
        if where and not others():
            bad.append(f"{said} ({where})" if where != channel else said)
            continue
        owner = proctable.real_uid(system, process.pid)
        if owner == 0:
            waiting.append(said)  # the node's own, and no fault of it is proven
            continue
        uids[owner] += 1
        server = waits_for_server(channel, stack)
        theirs.append(f"{said}, waits for a file server" if server else said)
    found = []
    if bad:
        found.append(STUCK.found(f"killed, still in state D: {_some(bad)}"))
    if theirs:
        uid = next((uid for uid, _ in uids.most_common() if uid >= FIRST_USER), -1)
        whose = f" of uid {uid}" if uid >= 0 else ""
        evidence = f"killed, still in state D{whose}, no driver of this node: {_some(theirs)}"
        found.append(STUCK.found(evidence, cls="user", action="none", uid=uid))
    if waiting:
        found.append(BLOCKED.found(f"in state D at each look: {_some(waiting)}"))
    return found


def _killed(system: System, process: ProcessStat) -> bool:
    dying = process.ending
    return dying or proctable.kill_pending(text(system, f"/proc/{process.pid}/status"))


def _ownerless(
    system: System, process: ProcessStat, busy: frozenset[int] | None, owners: proctable.Jobs
) -> bool:
    """True if no running job can own the process."""
    if not busy:
        return True
    job = owners.of(text(system, f"/proc/{process.pid}/cgroup"))
    return job is not None and job not in busy


def _left(
    system: System, table: list[ProcessStat], busy: frozenset[int], owners: proctable.Jobs
) -> list[Finding]:
    """Users' processes that belong to no running job."""
    ignored = _ignored(system)
    context = system.context
    own, others = Counter[int](), Counter[int]()
    for process in table:
        owner = proctable.uid(system, process)
        if owner < FIRST_USER or owner in ignored or owner in _SERVICES or owner == _NOBODY:
            continue
        cgroup = text(system, f"/proc/{process.pid}/cgroup")
        job = owners.of(cgroup)
        if proctable.is_login(cgroup) or job in busy or (job is None and busy):
            continue
        if process.ending:
            continue
        if context.where == "prolog" and job == context.job:
            continue  # a job's first step may be quicker than its prolog
        if context.where == "epilog" and job == context.job:
            own[owner] += 1
        else:
            others[owner] += 1
    found = []
    if own:
        said = f"{_owners(own)} in the cgroup of job {context.job}, which has ended"
        found.append(LEFT.found(said, status="FAIL", uid=own.most_common(1)[0][0]))
    if others:
        found.append(LEFT.found(f"{_owners(others)} of no running job"))
    return found


def _load(system: System, table: list[ProcessStat], one: float, active: int) -> list[Finding]:
    """Report more running processes than a node without jobs needs, now and in the last minute."""
    cpus = text(system, "/proc/stat").count("\ncpu") or 1
    limit = 4 + 0.1 * cpus
    if one < limit or active < limit:
        return []
    busy = Counter(_printable(p.name) for p in table if p.state == "R")
    most = ", ".join(f"{name} ({count})" for name, count in busy.most_common(NAMED))
    said = f"load {one:g} and {active} running with no job here, limit {limit:.1f}"
    return [LOAD.found(f"{said}; {most}" if most else said)]


def _ignored(system: System) -> set[int]:
    """The uids of the setting `ignore`: numbers, or names of /etc/passwd."""
    wanted = set(system.options("processes")["ignore"])
    uids = {int(word) for word in wanted if word.isdigit()}
    if any(not word.isdigit() for word in wanted):
        for line in text(system, "/etc/passwd").splitlines():
            fields = line.split(":")
            if len(fields) > 2 and fields[0] in wanted and fields[2].isdigit():
                uids.add(int(fields[2]))
    return uids


def _owners(counts: Counter[int]) -> str:
    return ", ".join(
        f"{counted(n, 'process', 'processes')} of uid {uid}" for uid, n in counts.most_common(NAMED)
    )


def _some(said: list[str]) -> str:
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return ", ".join(said[:NAMED]) + more


def _printable(name: str) -> str:
    """A process names itself: nothing of it may look like something else in a report."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-+/@") else "?" for c in name)[:15]


CHECK = Check(
    name="processes",
    run=_run,
    conditions=(STUCK, BLOCKED, LEFT, LOAD, ZOMBIES, EXHAUSTED, MANY),
    settings={
        "ignore": Setting(
            [], "users (names of /etc/passwd, uids) whose processes may be here without a job"
        ),
    },
    closes_on_error=False,
    deadline_s=8.0,
    cost_ms=1.0,
)
