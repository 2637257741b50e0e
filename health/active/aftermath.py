"""What follows from a burn-in: bad nodes are drained, and every node's history gets its result."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from health import history
from health.act import Drainer, Outcome, drain_event
from health.active.model import Judged, Level
from health.active_answer import BURN_IN
from health.aside import aside
from health.gate import told
from health.live import LiveSystem, context
from health.report import Report
from health.settings import Settings
from health.system import Event
from health.verdict import Verdict, judge

DRAIN_S = 20.0  # for each node
WRITE_S = 20.0  # for each node, on a file system that may be dead


def results(judged: Judged, nodes: Sequence[str], level: Level) -> dict[str, dict[str, Any]]:
    """Data of each node's event. Pure. ``ok`` only if every test that was to run passed there."""
    found = {}
    for node in nodes:
        data: dict[str, Any] = {"level": level, "ok": node in judged.cleared}
        data["result"] = "passed" if data["ok"] else "untested"
        why = judged.errors.get(node, ())
        if node in judged.named:
            data |= {"ok": False, "result": "failed"}
            why = judged.named[node]
        data["seconds"] = round(judged.seconds, 1)
        if why:
            data["why"] = [line[:300] for line in why[:5]]
        found[node] = data
    return found


def verdicts(judged: Judged, nodes: Sequence[str], settings: Settings) -> dict[str, Verdict]:
    """Of the nodes that are to be drained, by the rules of the gate. Pure."""
    found = {}
    for node in nodes:
        bad = [f for f in judged.findings.get(node, ()) if f.status == "FAIL" and f.cls == "node"]
        verdict = judge(Report(node, "burn-in", 0, 0.0, bad, [], 0.0, [], []), settings)
        if node in judged.named and verdict.closed:
            found[node] = verdict
    return found


def drain(settings: Settings, node: str, verdict: Verdict) -> tuple[Outcome, list[Event]]:
    """Drain another node, within the circuit breaker's limits; what to record of it."""
    system = LiveSystem(settings, context("burn-in", {}, node))
    outcome = Drainer(settings, system, time.monotonic() + DRAIN_S).drain(verdict.reason)
    if not outcome.drained or outcome.stood:
        return outcome, []
    event = drain_event(system, verdict.reason, outcome, told(verdict.closing[0]))
    return outcome, [event._replace(boot="")]  # the boot is this machine's


def write(settings: Settings, events: Mapping[str, Sequence[Event]]) -> str:
    """Into each node's shared history; why that failed, or ""."""
    if not settings.state_dir:
        return "no state_dir is set in robust.toml"
    failed = []
    for node, happened in events.items():
        why = aside(_teller(settings.state_dir, node, happened), WRITE_S)[1]
        if why:
            failed.append(f"{node}: {why}")
    more = f"; and {len(failed) - 3} more" if len(failed) > 3 else ""
    return "; ".join(failed[:3]) + more


def _teller(state_dir: str, node: str, events: Sequence[Event]) -> Any:
    return lambda: history.tell(state_dir, node, events)


def event(data: Mapping[str, Any]) -> Event:
    """Of a node whose running boot nobody here knows."""
    return Event(round(time.time(), 6), BURN_IN, "", data)
