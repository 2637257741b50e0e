"""Slurm's Prolog: admits the job with exit code 0, or drains the node and ends with 1.

slurmd calls it as root on every node of a job, with no PATH and only SLURM_* in its environment,
and waits for it. While all is well it asks Slurm nothing, uses no network and writes nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

# Imported with this module, not later: the stub bounds the time of its import.
from health.gate import gate as gates
from health.gate.gate import Gate, say, serve, told
from health.gate.verdict import Verdict
from health.run.report import GateReport

if TYPE_CHECKING:
    from robust_slurm.command_line.parser import Parser

SKIP = "robust:skip"
FIRST_ALARM_S = 20.0  # until the settings say how long it may take


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the job may run; 1: it may not, and the node is drained; 2: wrong arguments."""
    words = sys.argv[1:] if argv is None else list(argv)
    return serve("prolog", words, FIRST_ALARM_S, _admit)


def build_parser() -> Parser:
    """Return the parser, for a person who asks; slurmd's calls do without it."""
    return gates.build_parser("prolog")


def _admit(gate: Gate) -> int:
    deadline_s, begun = gate.settings.deadline("prolog"), time.monotonic()
    _end_tests(gate)
    # Ending the tests takes its time from the checks, which keep at least half of theirs: the
    # time after the checks is for Slurm.
    deadline_s = max(deadline_s / 2, deadline_s - (time.monotonic() - begun))
    wish = asks_to_skip(gate.system.context.env)
    if wish:
        granted = bool(gate.settings.gate["allow_skip"])
        gate.record([gate.event("skip", by=wish, granted=granted)], shared=False)
        if granted:
            return 0
    report = gate.check("prolog", deadline_s)
    report, verdict = gate.judge(report)
    if not verdict.closed:
        if report.findings:
            gate.record([gate.run_event(report, verdict, "admitted")], shared=False)
        return 0
    return _close(gate, report, verdict)


def _end_tests(gate: Gate) -> None:
    """End the active tests that the epilog or the sweep may still run on this node."""
    from health.node_claim import give_way

    failed = give_way(gate.spool)
    if failed:
        say(failed)


def _close(gate: Gate, report: GateReport, verdict: Verdict) -> int:
    lead = verdict.closing[0]
    say(f"{verdict.reason} {told(lead)}")  # slurmd logs the first bytes only
    for finding in verdict.closing[1:]:
        say(told(finding))
    outcome = gate.drain(verdict.reason, lead.uid)
    say(f"{gate.system.context.node} {outcome}")
    events = [gate.run_event(report, verdict, str(outcome)), *gate.new_events()]
    events += gate.drain_events(verdict.reason, outcome, told(lead))
    gate.record(events, shared=True)
    return 0 if gate.admits(outcome) else 1


def asks_to_skip(env: Mapping[str, str]) -> str:
    """Name the variable in which the job's user asks to skip the checks; "" if none. Pure."""
    for name in ("SLURM_JOB_COMMENT", "SLURM_JOB_EXTRA"):
        if SKIP in env.get(name, "").replace(",", " ").replace(";", " ").split():
            return name
    return ""
