"""Slurm's Prolog: admits the job with exit code 0, or drains the node and ends with 1.

slurmd calls it as root on every node of a job, with no PATH and only SLURM_* in its environment,
and waits for it. While all is well it asks Slurm nothing, uses no network and writes nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from health.gate import Gate
    from health.report import Report
    from health.verdict import Verdict

SKIP = "robust:skip"
FIRST_ALARM_S = 20.0  # until the settings say how long it may take


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0: the job may run; 1: it may not, and the node is drained; 2: wrong arguments."""
    words = sys.argv[1:] if argv is None else list(argv)
    gate: Gate | None = None
    try:
        from health.gate import Gate, alarm, refused

        code = refused("prolog", words)
        if code is not None:
            return code
        alarm(FIRST_ALARM_S)
        gate = Gate("prolog", words, os.environ)
        if not gate.enabled:
            return 0
        alarm(gate.left(FIRST_ALARM_S * 100) + 1.0)
        code = _admit(gate)
        alarm(0)
        return code
    except Exception as error:  # noqa: BLE001 - whatever breaks: never open in silence
        return _crashed(error, words, gate)


def _admit(gate: Gate) -> int:
    wish = asks_to_skip(gate.system.context.env)
    if wish:
        granted = bool(gate.settings.gate["allow_skip"])
        gate.record([gate.event("skip", by=wish, granted=granted)], shared=False)
        if granted:
            return 0
    report = gate.check("prolog", gate.settings.deadline("prolog"))
    report, verdict = gate.judge(report)
    if not verdict.closed:
        if report.findings:
            gate.record([gate.run_event(report, verdict, "admitted")], shared=False)
        return 0
    return _close(gate, report, verdict)


def _close(gate: Gate, report: Report, verdict: Verdict) -> int:
    from health.act import drain_event
    from health.gate import as_slurm_says, say, told

    lead = verdict.closing[0]
    say(f"{verdict.reason} {told(lead)}")  # slurmd logs the first bytes only
    for finding in verdict.closing[1:]:
        say(told(finding))
    outcome = gate.drain(verdict.reason)
    say(f"{gate.system.context.node} {outcome}")
    admitted = bool(outcome.bound) or gate.dry_run
    events = [gate.run_event(report, verdict, str(outcome)), *gate.new_events()]
    if not (admitted or outcome.kept or outcome.stood):
        slurm = as_slurm_says("prolog", outcome)
        events.append(drain_event(gate.system, verdict.reason, outcome, told(lead), slurm))
    gate.record(events, shared=True)
    # With the breaker open Slurm must not drain either, as it does on exit code 1.
    return 0 if admitted else 1


def asks_to_skip(env: Mapping[str, str]) -> str:
    """The variable in which the job's user asks for no checks; "" if in none. Pure."""
    for name in ("SLURM_JOB_COMMENT", "SLURM_JOB_EXTRA"):
        if SKIP in env.get(name, "").replace(",", " ").replace(";", " ").split():
            return name
    return ""


def _crashed(error: Exception, words: Sequence[str], gate: Gate | None) -> int:
    try:
        from health.gate import crashed

        return crashed("prolog", error, words, gate)
    except Exception as worse:  # noqa: BLE001 - the last resort: closed, and Slurm drains
        os.write(2, f"robust: prolog broke: {error!r}, then {worse!r}\n".encode())
        return 1
