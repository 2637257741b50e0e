"""Attempts of a clock, and of a full disk, to have the gate forget: no user is needed for these.

``robust.toml`` is cut where a full disk cuts it; the clock goes back an hour, or was years ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from bench.attacks.attack import Attack, Got
from bench.attacks.cases.reports import NONE
from bench.attacks.room import Room
from health import settings, settings_last
from health.admin.render import robust_toml
from health.checks import ALL
from health.gate.breaker import Drain, DrainLimits
from health.gate.reserve import parse, reserve
from health.gate.undrain import lifted_by_others
from health.history import events
from health.history.cures import cured
from health.history.state import node_state
from health.node import rootfiles
from health.node.system import Event

BACK_S, AHEAD_S = 3660.0, 28 * 365 * 86_400.0
LIMITS = DrainLimits(5, 10.0, 3600.0, 2)
XID = {"gpu": "0000:1b:00.0", "code": 79, "at": 1, "last": 1, "count": 1, "text": "Xid 79"}


def _cut(room: Room) -> Got:
    """Cut robust.toml at each 97th byte."""
    path = room.top / "robust.toml"
    whole = robust_toml(ALL).replace("# dry_run = false", "dry_run = true")
    path.write_text(whole)
    settings_last.keep(str(path))
    silent, lost = 0, 0
    sizes = range(1, len(whole) - 1, 97)
    for size in sizes:
        path.write_text(whole[:size])
        found = settings.load(str(path), "n1", ALL)
        settings_last.keep(str(path))
        silent += not found.problems
        lost += not found.gate["dry_run"]
    what = f"{len(sizes)} cuts: {silent} taken without a word, {lost} ended the dry run"
    return Got(what=what, succeeded=bool(silent or lost), silent=bool(silent))


def _cut_sweep(room: Room) -> Got:
    """Let a real sweep run over a file that is cut."""
    room.site(f"disabled = {NONE}\ndry_run = true")
    room.gate("health.sweep")
    path = room.top / "robust.toml"
    whole = path.read_text()
    path.write_text(whole[: whole.index("disabled")])
    said = [room.gate("health.sweep"), room.gate("prolog.cli", room.job())]
    found = settings.load(str(path), "n1", ALL)
    copy = Path(f"{path}.last").read_text() == whole
    wrong = not found.gate["dry_run"] or not found.problems or not copy or bool(room.orders())
    what = (
        f"dry run {found.gate['dry_run']}, copy whole: {copy}, exit codes {[e.code for e in said]}"
    )
    return Got(what=what, succeeded=wrong, silent=not found.problems, drained=room.drains())


def _breaker(step: float) -> Callable[[Room], Got]:
    def run(room: Room) -> Got:
        room.site()
        now = time.time()
        for number in range(5):
            reserve(
                f"{room.top}/state", Drain(now + number, f"n{number}", 0, "mounts"), LIMITS, 200
            )
        got = reserve(f"{room.top}/state", Drain(now - step, "n9", 0, "mounts"), LIMITS, 200)
        return Got(what=got.why or "a sixth drain is allowed", succeeded=got.allowed)

    return run


def _repaired(step: float) -> Callable[[Room], Got]:
    """Repair a drained node with a faulty GPU after the clock has gone back."""

    def run(room: Room) -> Got:
        room.site()
        spool, now = str(room.top / "spool"), time.time()
        drain = Event(
            now + step, "drain", "b", {"reason": "robust:node:x:-:service", "placed": True}
        )
        for event in (
            Event(now + step, "xid", "b", XID),
            drain,
            Event(now + 5, "repaired", "b", {}),
        ):
            events.append(spool, [event])
        known = events.load(spool)
        why = cured("service", "", drain, known, "b", now - 9e5)
        faults = node_state(known, now + 60, "b").faults
        events.append(spool, [Event(now + 9, "undrain", "b", {})])
        others = lifted_by_others({"IDLE"}, events.load(spool))
        wrong = [why, *(fault.check for fault in faults), *(["lifted by others"] if others else [])]
        what = "; ".join(filter(None, wrong)) or "the repair counts"
        return Got(what=what, succeeded=any(wrong))

    return run


def _digits(room: Room) -> Got:
    """Put numbers of 400 digits into the node's history and the fleet's ledger."""
    room.site(f"disabled = {NONE}")
    line = b'{"time":1%s,"kind":"drain","node":"n2","job":0,"boot":"b","data":{}}\n' % (b"0" * 400)
    for name in ("spool/history.jsonl", "state/nodes/drains.jsonl", "state/nodes/n1.jsonl"):
        (room.top / name).write_bytes(line)
    ended = room.gate("health.sweep")
    broke = "Overflow" in ended.err or "failed" in ended.err
    found = parse(rootfiles.records(line))
    return Got(
        what=ended.said[:100] or "no word", succeeded=broke or bool(found) or ended.code != 0
    )


ATTACKS = [
    Attack(name=name, row="clock", tries=tries, run=run)
    for name, tries, run in (
        ("settings_cut", "a full disk cuts robust.toml anywhere", _cut),
        (
            "settings_cut_sweep",
            "a sweep and a prolog find robust.toml cut in its dry run",
            _cut_sweep,
        ),
        (
            "clock_breaker",
            "the clock goes back 61 min on all nodes after five drains",
            _breaker(BACK_S),
        ),
        (
            "clock_breaker_month",
            "the clock goes back a month after five drains",
            _breaker(30 * 86_400.0),
        ),
        (
            "clock_repaired",
            "the clock goes back 61 min before a node is repaired",
            _repaired(BACK_S),
        ),
        ("clock_ahead", "the clock was 28 years ahead when a fault was logged", _repaired(AHEAD_S)),
        ("ledger_digits", "numbers of 400 digits in each of root's ledgers", _digits),
    )
]
