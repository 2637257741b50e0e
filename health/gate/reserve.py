"""The fleet's automatic drains: each gate writes its own down before it drains, under one lock.

The file is ``<state_dir>/nodes/drains.jsonl`` and belongs to root. The holder of the lock sees all
earlier drains, so the circuit breaker's limits hold however many gates fail at once. Refused drains
are recorded there too, once per node, cause and window, for the doctor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from health.gate.breaker import USER, Decision, Drain, DrainLimits, allowed, allowed_for_user
from health.gate.fleet_file import LOOK_BACK, locked
from health.history.events import NODES
from health.node import rootfiles
from health.node.rootfiles import closing
from health.node.slurmconf import _pairs, _with_includes, load
from health.node.system import System
from robust_slurm.hostlist import expand
from robust_slurm.state_dir.plain import ANY_CLOCK, moment, whole

NAME = "drains"
PENDING_S = 120.0  # after this time Slurm shows a reserved drain, or it was not made
FULL_S = 300.0  # how long a refusal for too many drained nodes holds without asking Slurm again
NEWEST = 1 << 16  # bytes: more drains than limits let through, in some milliseconds
_SAME = 1000  # drains of one user, the newest: more than may stand
_SURE = 16  # this many old records in a row show that all before them are old too


class Refusal(NamedTuple):
    """A drain that was not made. ``stand``: because too many nodes stand drained."""

    time: float
    node: str
    cause: str
    reason: str
    why: str
    stand: bool
    uid: int = -1


class Permission(NamedTuple):
    """``pending``: other nodes' drains that Slurm may not show yet; ``same``: the drains of the
    same user, however old."""

    allowed: bool
    why: str
    pending: Sequence[Sequence[Any]] = ()
    same: Sequence[Sequence[Any]] = ()


def reserve(
    state_dir: str, own: Drain, limits: DrainLimits, fleet_size: int, reason: str = ""
) -> Permission:
    """Ask for one drain and write it down if it is allowed; else why not, with ``reason``.

    See ``fleet_file.locked`` for what it raises, and blocks for.
    """
    with locked(state_dir, NAME) as fd:
        since = 0.0 if own.cause == USER else own.time - 2 * max(limits.window, FULL_S)
        records = _newest(fd, since)
        drains, refused = parse(records, own.time), refusals(records)
        decision = allowed(drains, own.time, limits, fleet_size, own)
        if decision.allowed:
            decision = allowed_for_user(drains, (), own.time, limits, own)
        for last in refused:
            alike = (last.cause, last.uid) == (own.cause, own.uid)
            if last.stand and alike and abs(own.time - last.time) < FULL_S:
                decision = Decision(False, last.why)
        if decision.allowed:
            rootfiles.append(fd, rootfiles.line_of(own._asdict()))
        elif not _known(refused, own, limits.window):
            rootfiles.append(fd, _refusal(own, reason, decision.why, stand=False))
        near = [d for d in drains if d.node != own.node and abs(d.time - own.time) < PENDING_S]
        same = [d for d in drains if own.cause == USER and (d.cause, d.uid) == (USER, own.uid)]
        return Permission(*decision, near, same[-_SAME:])


def _newest(fd: int, since: float) -> list[dict[str, Any]]:
    """Return the records that may still count: at least those after ``since``.

    Only the file's end is read, and more only if that may not reach back far enough: a hundred
    gates may wait for the lock, each for a second at most, and an old ledger has ten thousand
    records.
    """
    found = rootfiles.records(rootfiles.tail(fd, NEWEST))
    drains = [_drain(record) for record in found[:_SURE]]
    over = len(drains) == _SURE and all(one is not None and one.time < since for one in drains)
    if over or os.fstat(fd).st_size <= NEWEST:
        return found
    return rootfiles.records(rootfiles.tail(fd, LOOK_BACK))


def withdraw(state_dir: str, own: Drain, reason: str = "", why: str = "") -> None:
    """Record that a reserved drain was not made, so that it no longer counts. Like ``reserve``.

    ``why``: too many nodes stand drained; kept with ``reason``.
    """
    with locked(state_dir, NAME) as fd:
        rootfiles.append(fd, rootfiles.line_of({**own._asdict(), "withdrawn": True}))
        if why:
            rootfiles.append(fd, _refusal(own, reason, why, stand=True))


def _refusal(own: Drain, reason: str, why: str, *, stand: bool) -> bytes:
    more = {"refused": why[:300], "reason": reason[:200], "stand": stand}
    return rootfiles.line_of({**own._asdict(), **more})


def _known(refused: Iterable[Refusal], own: Drain, window: float) -> bool:
    return any(
        (one.node, one.cause) == (own.node, own.cause) and abs(own.time - one.time) < window
        for one in refused
    )


def refused_lately(state_dir: str, since: float) -> list[Refusal]:
    """The drains that the breaker refused since then, oldest first. Raises OSError; may block."""
    with closing(rootfiles.open_dir(f"{state_dir}/{NODES}")) as nodes:
        try:
            fd = rootfiles.open_file(nodes, f"{NAME}.jsonl", os.O_RDONLY)
        except FileNotFoundError:
            return []
    with closing(fd):
        found = refusals(rootfiles.records(rootfiles.tail(fd, LOOK_BACK)))
    return [one for one in found if one.time >= since]


def refusals(records: Iterable[dict[str, Any]]) -> list[Refusal]:
    """The refusals among the records, in the order of the file. Pure."""
    found = []
    for record in records:
        drain = _drain(record)
        if drain is not None and record.get("refused"):
            reason, why = str(record.get("reason", "")), str(record["refused"])
            stand = record.get("stand") is True
            known = (drain.time, drain.node, drain.cause, reason, why, stand, drain.uid)
            found.append(Refusal(*known))
    return found


def parse(records: Sequence[Mapping[str, Any]], now: float = ANY_CLOCK) -> list[Drain]:
    """The drains that stand, in the order of the file; what is no drain is left out. Pure.

    A drain with a time after ``now`` was dated by a clock that was wrong, or is: it counts as made
    just before the records that follow it, or now. ``breaker.AHEAD_S`` is for Slurm's list alone.
    """
    found: dict[Drain, Drain | None] = {}  # None: withdrawn
    latest = now  # that a record's true time can be
    for record in reversed(records):
        drain = _drain(record)
        if drain is None:
            continue
        if not record.get("refused") and drain not in found:
            dated = drain if drain.time <= now else drain._replace(time=latest)
            found[drain] = None if record.get("withdrawn") else dated
        if drain.time <= now:
            latest = min(latest, drain.time)
    return [drain for drain in reversed(found.values()) if drain is not None]


def _drain(record: Mapping[str, Any]) -> Drain | None:
    time, node = moment(record.get("time"), ANY_CLOCK), record.get("node")
    job = whole(record.get("job"))
    if time is None or not isinstance(node, str) or job is None:
        return None
    cause = record.get("cause", USER if record.get("user") is True else "")
    uid = record.get("uid", -1)
    if isinstance(uid, bool) or not isinstance(uid, int) or not isinstance(cause, str):
        return None
    return Drain(time, node, job, cause, uid)


def fleet_size(system: System) -> int:
    """The number of nodes that slurm.conf names; 0: unknown."""
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
