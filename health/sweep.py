"""`robust-health sweep`, Slurm's HealthCheckProgram: every few minutes, whatever the node does.

Drains a node that fails, and undrains one that robust-slurm drained once its checks pass and the
required action was done. Copies the node's history to the shared ledger, and finds late reports.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from health.check import Where
from health.finding import Finding
from health.gate import active_child
from health.gate.act import drain_event, open_door, rules_of, stands
from health.gate.active_answer import owed
from health.gate.fleet_file import copy_fleet
from health.gate.gate import RECORD_S, Gate, alarm, broke, say, told
from health.gate.holds import held_until, settled
from health.gate.inquiry import LEMON, Inquiry, acquitted
from health.gate.proof import due
from health.gate.undrain import LIFTED, DrainStanding, Ours, lifted_by_others, ours, why_not
from health.gate.verdict import Verdict, reason_for
from health.history import events as history
from health.history.cures import noticed_resets
from health.history.job_notes import notes
from health.node import jobs
from health.node.proctable import account
from health.node.silent import AGAIN, call_on, first_silence
from health.node.system import Event
from health.run.report import GateReport
from health.settings import SITE_FILE
from health.settings_last import keep

if TYPE_CHECKING:
    from robust_slurm.command_line.parser import Parser
    from robust_slurm.slurm import Slurm, SlurmNode

DESCRIPTION = """\
Check this node and drain it, or undrain it if robust-slurm drained it and the cause is gone.
For HealthCheckProgram in slurm.conf (its node is SLURMD_NODENAME). Exit code 0; 2 bad input."""
_CLEAN_S = 8.0  # for leftovers that a drain was about
_LOOK_S = 5.0  # for reports
_TEST = 0.5  # of the time for the checks: the most that a reported node's tests take of it


def main(argv: Sequence[str]) -> int:
    """Return 0 whatever is found, as slurmd only logs another exit code; 2: wrong arguments."""
    words = list(argv)
    as_json = "--json" in words
    if any(word not in ("--dry-run", "--json") for word in words):
        from robust_slurm.command_line.by_hand import refuse

        return refuse(build_parser(), words)
    gate: Gate | None = None
    try:
        gate = Gate("sweep", words, os.environ)
        failed = keep(os.environ.get("ROBUST_SITE_CONFIG") or SITE_FILE)
        if failed:
            say(failed)
        if gate.enabled:
            alarm(gate.left(3600.0) + 1.0)
            sweep = Sweep(gate)
            sweep.run()
            alarm(0)
            if as_json:
                sweep.print_json()
    except Exception as error:  # noqa: BLE001 - no drain: every job still meets the prolog
        alarm(0)
        data = broke("sweep", error)
        if gate is not None:
            gate.record([gate.event("crash", **data)], shared=False)
    return 0


def build_parser() -> Parser:
    """Return the parser, for a person who asks; slurmd's calls do without it."""
    from robust_slurm.command_line.by_hand import gate_parser

    parser = gate_parser("robust-health sweep", DESCRIPTION)
    add_json(parser)
    return parser


def add_json(parser: Parser) -> None:
    parser.json_option("print the verdict and what was recorded as JSON")


class Sweep:
    """One sweep."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._system = gate.system
        self._node = gate.system.context.node
        self._ends = gate.begin + gate.settings.deadline("sweep")  # of the checks
        self._inquiry = Inquiry(gate.settings, gate.system)
        self._events: list[Event] = []
        self._verdict: Verdict | None = None

    def run(self) -> None:
        self._exchange()
        known = self._history()
        booted = self._system.now() - self._system.uptime()
        if not any(event.boot == self._system.boot_id() for event in known):
            self._events.append(Event(booted, "boot", self._system.boot_id(), {}))
        self._events += self._gate.new_events()
        node = self._ask()
        boot = self._system.boot_id()
        if node is not None and (lifted := lifted_by_others(node.state, known, boot)):
            was = str(lifted.data.get("reason", ""))
            self._events.append(self._gate.event(LIFTED, reason=was))
        standing = _standing(node)
        mine = ours(standing, known) if standing else None
        try:
            self._find_reports()
            report, verdict = self._check(mine, known)
            kept = ""
            if standing and mine and not verdict.closed:
                now = [*known, *self._events, *self._inquiry.events]
                kept = self._why_not(standing, mine, now, booted)
                if not kept:
                    report, verdict, kept = self._test(report, verdict, mine, known)
            self._verdict = verdict
            if verdict.closed:
                self._close(node, report, verdict)
            else:
                if report.findings:
                    self._events.append(self._gate.run_event(report, verdict, "open"))
                elif due([*known, *self._events], time.time()):
                    self._events.append(self._gate.event("pass"))
                if standing and mine:
                    self._open(standing, mine, kept)
            self._events += self._resets(report, known)
        finally:
            for error in self._inquiry.errors:
                say(error)
            self._events += self._inquiry.events
            recorded = not self._events or self._gate.record(self._events, shared=True)
            self._inquiry.close(recorded=recorded)

    def print_json(self) -> None:
        """Print what was found and done: the verdict, and the events that were recorded."""
        import json

        verdict = self._verdict.as_dict() if self._verdict else None
        events = [event._asdict() for event in self._events]
        found = {"version": 1, "node": self._node, "verdict": verdict, "events": events}
        print(json.dumps(found, indent=1), flush=True)

    # ---- files

    def _exchange(self) -> None:
        """Bring the local history to the shared file and back, and the fleet's values here."""
        state_dir, spool = self._gate.settings.state_dir, self._gate.spool
        if not state_dir:
            return
        failed = history.record(spool, state_dir, self._node, [], 2 * RECORD_S).shared
        if not failed:
            failed = call_on(state_dir, lambda: copy_fleet(state_dir, spool), RECORD_S)[1]
        if failed and failed != AGAIN and not first_silence(state_dir):
            say(f"{state_dir}: {failed}")

    def _history(self) -> list[Event]:
        try:
            return self._system.history()
        except OSError as error:
            say(f"no history: {error}")
            return []

    # ---- Slurm

    def _door(self) -> Slurm:
        settings = self._gate.settings
        return open_door(settings)(self._gate.left(float(settings.gate["scontrol_deadline"])))

    def _ask(self) -> SlurmNode | None:
        """The node's own record, in one bounded call."""
        from robust_slurm.slurm import SlurmError

        try:
            return self._door().nodes([self._node]).get(self._node)
        except SlurmError as error:
            say(f"nothing is drained or undrained: {error}")
            return None

    def _undrain(self, reason: str) -> str:
        """Undrain the node if this drain still stands; return why it was not done, or ""."""
        from robust_slurm.slurm import SlurmError

        if self._gate.dry_run:
            return "dry run: would be undrained"
        try:
            # The checks took their time: a person may have written into the reason meanwhile.
            now = self._door().nodes([self._node]).get(self._node)
            if now is not None and now.reason == reason:
                result = self._door().undrain(self._node, expect_reason_prefix=reason)
                if result.done:
                    return ""
                now = result.before
        except SlurmError as error:
            return f"not undrained: {error}"
        if now is None:
            return "not undrained: Slurm no longer has the node"
        return f"not undrained: it is {'+'.join(sorted(now.state))}, reason {now.reason}"

    # ---- checks

    def _find_reports(self) -> None:
        """Reports that came after the epilog had looked."""
        if not self._gate.settings.state_dir or self._gate.dry_run:
            return
        try:
            which = notes(self._gate.spool, time.time())
        except OSError as error:
            say(f"no notes on jobs: {error}")
            return
        self._inquiry.find(which, time.monotonic() + _LOOK_S)

    def _check(self, mine: Ours | None, known: Iterable[Event]) -> tuple[GateReport, Verdict]:
        """Run the checks: the deep ones if the node is reported, or drained by robust-slurm."""
        free = not jobs.maybe(self._system)
        more = self._leftovers(mine) if mine else []
        left = self._ends - time.monotonic()
        until = time.monotonic() + _TEST * left
        more += self._inquiry.test(free, until)
        why = "accusation" if self._inquiry.reported else owed(known, time.time())
        active, events = active_child.followed_up(self._gate, why, free, until)
        more += active
        if self._inquiry.reported or (events and events[0].data["result"] != "owed"):
            self._events += events  # a test that is still owed is in the history already
        where: Where = "deep" if self._inquiry.reported or mine else "sweep"
        report = self._gate.check(where, max(1.0, self._ends - time.monotonic()))
        report, verdict = self._gate.judge(report, more)
        lemon = self._inquiry.conclude(verdict)
        return self._gate.judge(report, lemon) if lemon else (report, verdict)

    def _leftovers(self, mine: Ours) -> list[Finding]:
        """Retry to clear what the epilog could not; only its drain names the job and user."""
        from health.leftovers import cleanup

        if mine.reason.check not in cleanup.UNCLEARED or self._gate.dry_run:
            return []
        job, uid = mine.reason.job, mine.event.data.get("uid", -1)
        steps = jobs.maybe(self._system)
        mode = str(self._gate.settings.epilog["leftovers"])
        if not isinstance(uid, int) or uid <= 0:
            return []  # its record is lost; the checks' own look at processes must do
        return cleanup.clear(job, uid, mode, steps, [], self._gate.left(_CLEAN_S)).findings

    # ---- what follows

    def _close(self, node: SlurmNode | None, report: GateReport, verdict: Verdict) -> None:
        for finding in verdict.closing:
            say(told(finding))
        if node is None:
            self._events.append(self._gate.run_event(report, verdict, "Slurm did not answer"))
            return
        lead = verdict.closing[0]
        reason = reason_for(lead, self._job_of(account(self._system, lead.uid)))
        outcome = stands(node, reason) or self._gate.drain(reason, lead.uid)
        say(f"{self._node} {reason} {outcome}")
        self._events.append(self._gate.run_event(report, verdict, str(outcome)))
        if outcome.drained and not outcome.stood:
            evidence, behind = told(lead), self._inquiry.behind
            placed = drain_event(
                self._system, reason, outcome, evidence, behind=behind, uid=lead.uid
            )
            self._events.append(placed)

    def _job_of(self, uid: int) -> int:
        """The last job here of the user who is to blame; 0: nobody is, or nothing is known."""
        try:
            known = notes(self._gate.spool, time.time()) if uid > 0 else []
        except OSError:
            return 0
        return next((note.job for note in known if note.uid == uid), 0)

    def _why_not(
        self, standing: DrainStanding, mine: Ours, events: Iterable[Event], booted: float
    ) -> str:
        boot = self._system.boot_id()
        places = self._places() if mine.reason.device.startswith("gpu") else {}
        known = list(events)
        now, settings = time.time(), self._gate.settings
        free = mine.reason.check == LEMON.check and acquitted(known, settings, mine.event.time)
        kept = why_not(standing, mine, known, boot, booted, places, free)
        until = held_until(mine.reason, mine.event, known, rules_of(self._gate.settings))
        if kept or free or until <= now or settled(mine.event, known):
            return kept
        return f"held down until {time.strftime('%H:%M:%S', time.localtime(until))}"

    def _test(
        self, report: GateReport, verdict: Verdict, mine: Ours, known: Iterable[Event]
    ) -> tuple[GateReport, Verdict, str]:
        """Run the active tests before an undrain; the text says why the drain stays, or ""."""
        free = not jobs.maybe(self._system)
        found, events = active_child.before_undrain(
            self._gate, mine.event.time, known, free, self._ends
        )
        self._events += events
        if found is None or found.result == "passed":
            return report, verdict, ""
        report, verdict = self._gate.judge(report, found.findings)
        off = found.result == "failed" and not verdict.closed  # by [gate] disabled
        return report, verdict, "" if off else f"the active tests: {found.told}"

    def _open(self, standing: DrainStanding, mine: Ours, kept: str) -> None:
        kept = f"stays drained: {kept}" if kept else self._undrain(standing.reason)
        if kept:
            say(f"{self._node} {standing.reason}: {kept}")
            return
        say(f"{self._node} undrained: {standing.reason}: every check passes")
        self._events.append(
            self._gate.event("undrain", reason=standing.reason, action=mine.reason.action)
        )

    def _places(self) -> dict[str, str]:
        """PCI addresses by the names that findings use."""
        devices = self._system.nvml().get("devices", [])
        return {f"gpu{d['index']}": d["pci"] for d in devices if "index" in d and "pci" in d}

    def _resets(self, report: GateReport, known: Sequence[Event]) -> list[Event]:
        """Resets of GPUs that nobody recorded but NVML shows, for later."""
        from health.checks.gpu import xid

        answered = any(row.family == "nvml" and row.status == "PASS" for row in report.ran)
        if not answered:
            return []
        driver = xid.driver(self._system.nvml())
        now, boot = self._system.now(), self._system.boot_id()
        return noticed_resets([*known, *self._events], now, boot, driver)


def _standing(node: SlurmNode | None) -> DrainStanding | None:
    """The drain that stands, if one does."""
    if node is None or "DRAIN" not in node.state:
        return None
    return DrainStanding(node.state, node.reason or "", node.reason_time)
