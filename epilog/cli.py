"""Slurm's Epilog: removes what the job left, checks the node, verifies reports against it.

slurmd calls it as root on every node of a job that has ended. The epilog drains the node itself,
with its own reason; it ends with 1 ("Epilog error") only if Slurm could not be given that reason.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from health.check import Where
from health.children.call import call_in_child
from health.finding import Finding
from health.gate import gate as gates
from health.gate.active_answer import suspicious
from health.gate.active_child import followed_up
from health.gate.gate import LOCAL_S, Gate, say, serve, told
from health.gate.inquiry import Inquiry
from health.history import job_notes

# Imported with this module, not later: the stub bounds the time of its import.
from health.leftovers import cleanup
from health.leftovers.cleanup import Cleared
from health.node import jobs, proctable
from health.node.system import Event

if TYPE_CHECKING:
    from robust_slurm.command_line.parser import Parser

FIRST_ALARM_S = 40.0  # until the settings say how long it may take
_CLEAN = 0.35  # the most that clearing takes, as a share of the epilog's time
_LOOK = 0.1  # the same for finding reports


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0; 1: the node must be drained, and the reason was not placed; 2: wrong arguments."""
    words = sys.argv[1:] if argv is None else list(argv)
    return serve("epilog", words, FIRST_ALARM_S, _finish)


def build_parser() -> Parser:
    """Return the parser, for a person who asks; slurmd's calls do without it."""
    return gates.build_parser("epilog")


def _finish(gate: Gate) -> int:
    total_s = gate.settings.deadline("epilog")
    ends = gate.begin + total_s  # of the checks; what follows is for Slurm
    cleared = _clear(gate, _CLEAN * total_s)
    inquiry = Inquiry(gate.settings, gate.system)
    recorded = False
    try:
        _find_reports(gate, inquiry, time.monotonic() + _LOOK * total_s)
        code, recorded = _prove(gate, cleared, inquiry, ends)
        return code
    finally:
        inquiry.close(recorded=recorded)


def _clear(gate: Gate, deadline_s: float) -> Cleared:
    known, table = gate.system.context, gate.settings.epilog
    if gate.dry_run:
        return cleanup.clear(known.job, known.uid, "never", (), (), deadline_s)
    dirs = [*([cleanup.SHM] if table["clean_shm"] else []), *table["clean_dirs"]]
    steps = jobs.maybe(gate.system)
    sluids = proctable.own_sluid(known.env, known.job)
    return cleanup.clear(known.job, known.uid, table["leftovers"], steps, dirs, deadline_s, sluids)


def _find_reports(gate: Gate, inquiry: Inquiry, until: float) -> None:
    """Note the job for the sweep, and find the reports of its user against this node."""
    note = job_notes.note_of(gate.system.context, time.time())
    if note is None or not gate.settings.state_dir or gate.dry_run:
        return
    _, error = call_in_child(lambda: job_notes.save(gate.spool, note), LOCAL_S)
    if error:
        say(f"the job is not recorded: {error}")
    try:
        same = [one for one in job_notes.notes(gate.spool, time.time()) if one.job == note.job]
    except OSError:
        same = []
    inquiry.find(same or [note], until)


def _prove(gate: Gate, cleared: Cleared, inquiry: Inquiry, ends: float) -> tuple[int, bool]:
    """Check the node and act; return the exit code, and True if the events were recorded."""
    free = not jobs.maybe(gate.system)
    where: Where = "deep" if inquiry.reported else "epilog"
    most = ends - 0.3 * (ends - gate.begin)
    tests = inquiry.test(free, most)
    active, tested = _test(gate, inquiry, free, most)
    report = gate.check(where, max(1.0, ends - time.monotonic()))
    report, verdict = gate.judge(report, [*cleared.findings, *tests, *active])
    lemon = inquiry.conclude(verdict)
    if lemon:
        report, verdict = gate.judge(report, lemon)
    for error in inquiry.errors:
        say(error)
    events = [*inquiry.events, *tested]
    if cleared.worth_telling:
        events.append(gate.event("cleared", ended=cleared.ended, removed=cleared.removed))
    if any(finding.check == "xid-app" for finding in report.findings):
        events += gate.app_xids()
    code = 0
    if verdict.closed:
        for finding in verdict.closing:
            say(told(finding))
        outcome = gate.drain(verdict.reason, verdict.closing[0].uid)
        say(f"{gate.system.context.node} {verdict.reason} {outcome}")
        events += [gate.run_event(report, verdict, str(outcome)), *gate.new_events()]
        evidence = told(verdict.closing[0])
        events += gate.drain_events(verdict.reason, outcome, evidence, inquiry.behind)
        code = int(bool(outcome.error) and not gate.admits(outcome))
    elif report.findings:
        events.append(gate.run_event(report, verdict, "open"))
    kept = not events or gate.record(events, shared=verdict.closed or inquiry.reported)
    return code, kept


def _test(
    gate: Gate, inquiry: Inquiry, free: bool, until: float
) -> tuple[list[Finding], list[Event]]:
    """Run the active tests if the node is suspected; return findings and events to record."""
    if not gate.settings.active["python"]:
        return [], []
    ended = suspicious(gate.system.context.env) if gate.settings.active["suspicious"] else ""
    why = f"a job ended by {ended}" if ended else ""
    return followed_up(gate, "accusation" if inquiry.reported else why, free, until)
