"""Clearing what a job left on the node: its processes, then its memory and files."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from health.check import Condition
from health.children.call import call_in_child
from health.children.kernel_waits import driver
from health.children.others_wait import others_wait
from health.finding import Finding
from health.leftovers import files, processes
from health.leftovers.processes import Process
from health.node.leftover_files import FIRST_USER
from robust_slurm.text import one_line

SHM = "/dev/shm"  # with it go the objects of System V IPC
GRACE_S = 2.0  # between SIGTERM and SIGKILL
_ROUNDS_S = 0.2  # how long one round of SIGKILL is waited for before the next look
_CLOCK_S = 0.02  # by which a file's time may lag behind the clock
_SHOWN = 5  # processes named in the evidence

LEFT = Condition(
    "leftover-processes",
    "FAIL",
    "user",
    "clear-leftovers",
    "processes of the job's user that SIGKILL did not end within the epilog's time",
)
STUCK = Condition(
    "leftover-processes-stuck",
    "FAIL",
    "node",
    "reboot",
    "processes of the job's user that hang in a driver of this node's devices (state D) and "
    "ignore signals; class user, action none if that is not proven (see process-stuck)",
)
HUNG = Condition(
    "cleanup-hung",
    "FAIL",
    "user",
    "none",
    "the processes of the job's user cannot be listed in time: they are too many, or memory of one "
    "is on a file system that does not answer (one that hangs in a driver is process-stuck)",
)
FAILED = Condition(
    "cleanup-error",
    "ERROR",
    "tool",
    "none",
    "the clean-up of processes failed; the node is not proven bad",
)
FILES = Condition(
    "leftover-files",
    "WARN",
    "user",
    "none",
    "files or memory of the job's user could not be removed",
)
# Drains that only another look at the same user's processes can lift.
UNCLEARED = (LEFT.check, STUCK.check, HUNG.check, FAILED.check)


class Cleared(NamedTuple):
    """Result of a cleanup: ``ended`` processes, ``removed`` files and IPC objects."""

    ended: int
    removed: int
    findings: list[Finding]

    @property
    def worth_telling(self) -> bool:
        return bool(self.ended or self.removed or self.findings)


def clear(
    job: int,
    uid: int,
    mode: str,
    steps: Iterable[int],
    dirs: Sequence[str],
    deadline_s: float,
    sluids: Mapping[str, int] = MappingProxyType({}),
) -> Cleared:
    """Clear the job's leftovers; the findings are about those that stayed.

    ``mode``: "user", "job" or "never"; ``steps``: jobs with steps here (slurmd's spool); ``dirs``:
    the user's files there are removed once the user has no other job and no process here. Before
    that, only files that robust-task has named after the job are removed. ``sluids``: the numbers
    of jobs by SLUID, as slurmd tells the epilog its own.
    """
    if uid <= 0:
        return Cleared(0, 0, [])
    if mode == "never":
        wait_for_ending(uid, deadline_s)
        return Cleared(0, 0, [])
    until = time.monotonic() + deadline_s
    here = list(steps)
    said, error = call_in_child(
        lambda: end_leftovers(job, uid, mode, here, 0.7 * deadline_s, sluids), deadline_s
    )
    if error:
        if error.startswith("no answer"):
            return Cleared(0, 0, [HUNG.found(f"no list of processes: {error}", uid=uid)])
        return Cleared(0, 0, [FAILED.found(f"clearing the processes of job {job}: {error}")])
    left = [Process(*row) for row in said["left"]]
    findings = [one._replace(uid=uid) for one in _found(left, said["driver"])]
    removed = 0
    everything = said["gone"] and not left
    if uid >= FIRST_USER and (everything or SHM in dirs):
        time_left = max(0.5, until - time.monotonic())
        before = float(said["looked"]) - _CLOCK_S
        whose = 0 if everything else job
        answer, error = call_in_child(
            lambda: remove_files(uid, dirs, before, 0.9 * time_left, whose), time_left
        )
        removed, stayed = answer if not error else (0, [error])
        if stayed:
            text = one_line("; ".join(stayed))
            findings.append(FILES.found(f"not removed of uid {uid}: {text}"))
    return Cleared(int(said["ended"]), int(removed), findings)


def wait_for_ending(uid: int, deadline_s: float) -> None:
    """Wait until the user's processes that are ending have given back what they have.

    To Slurm they are gone before that. A GPU would be found in use.
    """

    def wait() -> None:
        until = time.monotonic() + 0.7 * deadline_s
        processes.wait_gone(processes.ending(uid, processes.everybodys()), until)

    call_in_child(wait, deadline_s)


def end_leftovers(
    job: int,
    uid: int,
    mode: str,
    steps: Sequence[int],
    budget_s: float,
    sluids: Mapping[str, int],
) -> dict[str, Any]:
    """Send SIGTERM, then SIGKILL until none is left or the time is over. May hang: use a child.

    The user's processes that are ending are waited for, and get no signal.
    ``left``: those that got one are in it while they are ending, too. ``gone``: the user has no
    other job here, and no other process.
    """
    until = time.monotonic() + budget_s
    signalled: dict[tuple[int, int], Process] = {}
    looked = 0.0
    slurmd = processes.own_unit()
    named = job in sluids.values()

    def scan() -> tuple[list[Process], list[Process], bool]:
        nonlocal looked
        looked = time.time()
        found = processes.scan(uid, sluids)
        alone = not processes.others(found, steps, job, uid)
        left = processes.leftovers(found, job, uid, mode, alone, slurmd, named=named)
        there = {p.pid for p in found if p.uid == uid and p.state not in "ZX"}
        gone = alone and there == {p.pid for p in left}
        return left, processes.ending(uid, found), gone

    def send(those: Sequence[Process], number: int) -> None:
        sent = (p for p in those if processes.send(p, number))
        signalled.update(((p.pid, p.start), p) for p in sent)

    left, ending, gone = scan()
    send(left, signal.SIGTERM)
    processes.wait_gone(left, min(until, time.monotonic() + GRACE_S))
    while left or ending:
        left, ending, gone = scan()
        if time.monotonic() >= until:
            break
        send(left, signal.SIGKILL)
        rounds = min(until, time.monotonic() + _ROUNDS_S) if left else until
        processes.wait_gone([*left, *ending], rounds)
    still = {key: now for key, p in signalled.items() if (now := processes.now(p))}
    left += [p for key, p in still.items() if key not in {(p.pid, p.start) for p in left}]
    return {
        "ended": len(signalled) - len(still),
        "left": left,
        "gone": gone,
        "looked": looked,
        "driver": _in_driver([p for p in left if p.state == "D"]),
    }


def _in_driver(stuck: Sequence[Process]) -> list[int]:
    """The pids of those that are proven to hang in a driver of this node's devices."""
    found = []
    for process in stuck:
        place = f"/proc/{process.place}"
        if driver(_text(f"{place}/wchan"), _text(f"{place}/stack")):
            found.append(process.pid)
    return [] if found and others_wait() else found


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read(1 << 14)
    except OSError:
        return ""


def remove_files(
    uid: int, dirs: Sequence[str], before: float, budget_s: float, job: int = 0
) -> tuple[int, list[str]]:
    """Remove the user's shared memory and files; return how many, and what stayed. May hang.

    ``job``: only the snapshots that the shims of this job have left in memory; 0: everything.
    """
    until = time.monotonic() + budget_s
    removed = files.clear_ipc(uid, before) if SHM in dirs and not job else 0
    stayed: list[str] = []
    for path in [SHM] if job else dirs:
        try:
            gone, left = files.clear_dir(path, uid, before, until, f"robust-{job}." if job else "")
        except OSError as error:
            gone, left = 0, [error.strerror or str(error)]
        removed += gone
        stayed += [f"{path}/{name}" for name in left]
    return removed, stayed


def _found(left: Sequence[Process], in_driver: Collection[int]) -> list[Finding]:
    """``in_driver``: the pids that hang in a driver of this node, which a reboot mends."""
    out = []
    # A process that is ending may be in state D while it gives much back: no reboot for that.
    stuck = [p for p in left if p.state == "D" and not p.ending]
    waits = STUCK._replace(cls="user", action="none")  # not proven to be the node's fault
    for condition, which in (
        (STUCK, [p for p in stuck if p.pid in in_driver]),
        (waits, [p for p in stuck if p.pid not in in_driver]),
        (LEFT, [p for p in left if p.state != "D" or p.ending]),
    ):
        if which:
            named = ", ".join(
                f"{p.pid} ({one_line(p.name, 60)}) state {p.state}{', ending' * p.ending}"
                for p in which[:_SHOWN]
            )
            more = f" and {len(which) - _SHOWN} more" if len(which) > _SHOWN else ""
            text = f"left after SIGKILL: {named}{more}"
            out.append(condition.found(text))
    return out
