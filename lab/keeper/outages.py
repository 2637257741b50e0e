"""Faults of several nodes at once, and of Slurm's daemons, in the keeper's hands.

A switch that fails, a shared file system that stalls and virtual machines that pause are events of
many nodes in the same instant. Each can end by itself after some seconds.
"""

from __future__ import annotations

import math
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab import linux
from lab.errors import LabError
from lab.keeper import node
from lab.keeper.lab_node import LabNode, find
from lab.spec import HEAD
from robust_slurm import process_stat

DAEMONS = {"slurmctld": True, "munged": True, "slurmd": False}  # name: runs on the head
ACTIONS = ("freeze", "thaw", "stop")
FROZEN, STOPPED = "frozen", "stopped"
_TERM_S = 15.0
_KILL_S = 15.0


def cut(one: LabNode) -> None:
    """Take the link of a node down."""
    linux.set_link(one.port, False)
    one.cut = True


def pause(one: LabNode) -> None:
    """Stop everything on a node, its kernel's answers included, as a hypervisor does."""
    cut(one)
    os.kill(one.pid, node.STOP_ALL)
    one.stopped = one.paused = True


def restore(one: LabNode) -> None:
    """End an outage or a pause of a node, if there is one."""
    one.back_at = math.inf
    if not one.pid:
        return
    if one.paused:
        os.kill(one.pid, node.CONTINUE_ALL)
        one.stopped = one.paused = False
    if one.cut:
        linux.set_link(one.port, True)
        one.cut = False


_LINKS: dict[str, Callable[[LabNode], None]] = {"outage": cut, "pause": pause, "reconnect": restore}
OPS = (*_LINKS, "stall", "resume")


def serve(
    nodes: Mapping[str, LabNode], op: str, names: Sequence[str], seconds: float, path: str
) -> float:
    """Do one of OPS to all the nodes in one go; return the wall-clock time of just before.

    `seconds`: an outage or a pause ends by itself then (0: it does not). `path`: the mount that
    stalls or resumes.
    """
    named = [find(nodes, name) for name in names]
    if not named:
        raise LabError(f"{op}: name the nodes")
    for one in named:
        if one.name == HEAD:
            raise LabError("the head is what the lab stands on: only its daemons can be broken")
        one.must_run()
    if op in ("stall", "resume"):
        for one in named:  # all are known to have the mount before the first one stalls
            assert one.gear is not None
            one.gear.mounted(path)
    at = time.time()
    end = time.monotonic() + seconds if seconds > 0 else math.inf
    for one in named:
        if op in _LINKS:
            _LINKS[op](one)
            one.back_at = math.inf if op == "reconnect" else end
        elif one.gear is not None:
            one.gear.mounted(path).stall(op == "stall")
    return at


def next_end(nodes: Mapping[str, LabNode]) -> float | None:
    """Return the seconds until an outage or a pause ends by itself, or None."""
    first = min(one.back_at for one in nodes.values())
    return None if first == math.inf else max(0.0, first - time.monotonic())


def end_due(nodes: Mapping[str, LabNode]) -> None:
    """End the outages and pauses whose time has come."""
    now = time.monotonic()
    for one in nodes.values():
        if one.back_at <= now:
            restore(one)


def daemon(one: LabNode, name: str, action: str) -> float:
    """Freeze (SIGSTOP), thaw or stop (SIGTERM, then SIGKILL) a daemon; Lab.daemon() starts one."""
    if name not in DAEMONS or DAEMONS[name] != (one.name == HEAD):
        here = " ".join(n for n, on_head in DAEMONS.items() if on_head == (one.name == HEAD))
        raise LabError(f"no daemon {name!r} on {one.name}; there are: {here}")
    one.must_run()
    at = time.time()
    pid = _daemon_pid(one.pid, name)
    if action == "started":  # by Lab.daemon()
        one.daemons.pop(name, None)
        return at
    if not pid:
        raise LabError(f"{name} does not run on {one.name}; `daemon {one.name} {name} start`")
    if action == "freeze":
        os.kill(pid, signal.SIGSTOP)
        one.daemons[name] = FROZEN
    elif action == "thaw":
        os.kill(pid, signal.SIGCONT)
        one.daemons.pop(name, None)
    elif action == "stop":
        _end(pid, name)
        one.daemons[name] = STOPPED
    else:
        raise LabError(f"a daemon can {' '.join(ACTIONS)} or start, not {action!r}")
    return at


def thaw_all(one: LabNode) -> None:
    """Let every frozen daemon of a node go on; the stopped ones are for Lab.heal()."""
    for name in [name for name, how in one.daemons.items() if how == FROZEN]:
        del one.daemons[name]
        pid = _daemon_pid(one.pid, name)
        if pid:
            os.kill(pid, signal.SIGCONT)


def _daemon_pid(parent: int, name: str) -> int:
    """Return the pid of a node's daemon, a child of its first process `parent`; 0: none."""
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdigit() or (entry / "comm").read_text().strip() != name:
                continue
            process = process_stat.read(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if process.parent == parent and process.state != "Z":
            return int(entry.name)
    return 0


def _end(pid: int, name: str) -> None:
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, signal.SIGCONT)  # a frozen one would never see the other
        signal.pidfd_send_signal(fd, signal.SIGTERM)
        if select.select([fd], [], [], _TERM_S)[0]:
            return
        signal.pidfd_send_signal(fd, signal.SIGKILL)  # a slurmctld was seen to need it
        if not select.select([fd], [], [], _KILL_S)[0]:
            raise LabError(f"{name} did not end within {_KILL_S:.0f} s of SIGKILL")
    finally:
        os.close(fd)
