"""The fleet's automatic drains: each gate writes its own down before it drains, under one lock.

``<state_dir>/nodes/drains.jsonl``, root's as all beside it. Whoever holds the lock sees every
drain before its own, so the circuit breaker's limits hold however many gates fail at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any

from health import rootfiles
from health.breaker import Decision, Drain, Limits, allowed
from health.history import NODES
from health.hostlist import expand
from health.slurmconf import _pairs, _with_includes, load
from health.system import System

FILE = "drains.jsonl"
_LOCK = "drains.lock"
_LOOK_BACK = 1 << 20  # bytes: ten thousand drains


def reserve(state_dir: str, own: Drain, limits: Limits, fleet_size: int) -> Decision:
    """Ask for one drain and write it down if it is allowed.

    Raises OSError where there is no ledger to trust, and blocks while the file system or another
    gate does: call it in a child.
    """
    nodes = rootfiles.open_dir(f"{state_dir}/{NODES}")
    held = rootfiles.lock(nodes, _LOCK)
    fd = rootfiles.open_file(nodes, FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        drains = parse(rootfiles.records(rootfiles.tail(fd, _LOOK_BACK)))
        decision = allowed(drains, own.time, limits, fleet_size, own)
        if decision.allowed:
            rootfiles.append(fd, rootfiles.line_of(own._asdict()))
            if os.fstat(fd).st_size > 2 * _LOOK_BACK:
                rootfiles.replace(nodes, FILE, rootfiles.tail(fd, _LOOK_BACK))
        return decision
    finally:
        for each in (fd, held, nodes):
            os.close(each)


def withdraw(state_dir: str, own: Drain) -> None:
    """The drain was not made after all: it counts no more. Like ``reserve``."""
    nodes = rootfiles.open_dir(f"{state_dir}/{NODES}")
    held = rootfiles.lock(nodes, _LOCK)
    fd = rootfiles.open_file(nodes, FILE, os.O_RDWR | os.O_APPEND)
    try:
        rootfiles.append(fd, rootfiles.line_of({**own._asdict(), "withdrawn": True}))
    finally:
        for each in (fd, held, nodes):
            os.close(each)


def parse(records: Iterable[dict[str, Any]]) -> list[Drain]:
    """The drains that stand, oldest first; what is no drain is left out. Pure."""
    found: dict[Drain, None] = {}
    for record in records:
        time, node, job = record.get("time"), record.get("node"), record.get("job")
        if isinstance(time, bool) or not isinstance(time, int | float) or not math.isfinite(time):
            continue
        if not isinstance(node, str) or isinstance(job, bool) or not isinstance(job, int):
            continue
        drain = Drain(float(time), node, job, record.get("user") is True)
        if record.get("withdrawn"):
            found.pop(drain, None)
        else:
            found[drain] = None
    return list(found)


def fleet_size(system: System) -> int:
    """How many nodes slurm.conf names; 0: it cannot be told."""
    conf = load(system)
    if not conf.path:
        return 0
    names: set[str] = set()
    try:
        for line in _with_includes(system, conf.path, system.read(conf.path), conf.values, []):
            if line.lstrip()[:9].lower() == "nodename=":
                names.update(expand(_pairs(line).get("nodename", "")))
    except (OSError, ValueError):
        return 0
    return len({name for name in names if name.upper() != "DEFAULT"})
