"""The steps after a burn-in: drain bad nodes, and write each node's result into its history."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from health.active.judging import records
from health.active_tests import BY_NAME, Judged, Level, fails
from health.gate.act import Drainer, DrainOutcome, drain_event
from health.gate.active_answer import BURN_IN, applying
from health.gate.gate import told
from health.gate.verdict import Verdict, judge
from health.node.system import Event
from health.run.live import LiveSystem, context
from health.run.report import GateReport
from health.settings import Settings

DRAIN_S = 20.0  # for each node


def results(judged: Judged, nodes: Sequence[str], level: Level) -> dict[str, dict[str, Any]]:
    """Return the data of each node's event. ``ok`` only if every single-node test passed. Pure."""
    found = {}
    for node in nodes:
        mine = [one for one in judged.measured if one.node == node]
        ran = {one.test for one in mine if one.test in BY_NAME and not one.error}
        missing = applying(any(one.device.startswith("gpu") for one in mine)) - ran
        data: dict[str, Any] = {"level": level, "ok": node in judged.cleared and not missing}
        data["result"] = "passed" if data["ok"] else "untested"
        data |= {"ran": sorted(ran)} if data["ok"] else {}
        why = judged.errors.get(node, ())
        if node in judged.cleared:
            why = tuple(line for line in judged.left_out if line.split(":")[0] in missing)
        if node in judged.named:
            data |= {"ok": False, "result": "failed"}
            why = judged.named[node]
        data["seconds"] = round(judged.seconds, 1)
        if why:
            data["why"] = [line[:300] for line in why[:5]]
        found[node] = data
    return found


def verdicts(judged: Judged, nodes: Sequence[str], settings: Settings) -> dict[str, Verdict]:
    """Return the verdicts on the nodes to drain, by the rules of the gate. Pure."""
    found = {}
    for node in nodes:
        bad = list(fails(judged.findings.get(node, ())))
        verdict = judge(GateReport(node, "burn-in", 0, 0.0, bad, [], 0.0, [], []), settings)
        if node in judged.named and verdict.closed:
            found[node] = verdict
    return found


def drain(settings: Settings, node: str, verdict: Verdict) -> tuple[DrainOutcome, list[Event]]:
    """Drain another node within the circuit breaker's limits; return the events to record."""
    system = LiveSystem(settings, context("burn-in", {}, node))
    outcome = Drainer(settings, system, time.monotonic() + DRAIN_S).drain(verdict.reason)
    if not outcome.drained or outcome.stood:
        return outcome, []
    event = drain_event(system, verdict.reason, outcome, told(verdict.closing[0]))
    return outcome, [event._replace(boot="")]  # the boot is this machine's


def write(settings: Settings, events: Mapping[str, Sequence[Event]]) -> str:
    """Write the events into each node's shared history; return why that failed, or ""."""
    if not settings.state_dir:
        return "no state_dir is set in robust.toml"
    return records.tell(settings.state_dir, events, records.WRITE_S)


def event(data: Mapping[str, Any]) -> Event:
    """Return a burn-in event of a node whose boot is not known here."""
    return Event(round(time.time(), 6), BURN_IN, "", data)
