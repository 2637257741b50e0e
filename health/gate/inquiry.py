"""Verify a report: check the node more deeply, then drain it with evidence, or count a strike.

The epilog does it when a job ends. robust-srun may write its report a little later, so the
epilog also notes in root's own spool which job was here; the sweep looks for its reports again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any

from health.check import Condition
from health.finding import Finding
from health.gate import strikes
from health.gate.verdict import Verdict
from health.history.job_notes import JobNote, claim, save
from health.history.node_reports import (
    AcceptedReport,
    Rejection,
    ReportingJob,
    ReportsFound,
    Withdrawal,
    find,
)
from health.history.state import StateRules, node_state, strikes_of
from health.node.silent import AGAIN, answers, call_on
from health.node.system import Event, System
from health.settings import Settings
from robust_slurm.text import counted, one_line

FIND_S = 2.0  # for the shared file system
STRIKE_S = 1.5  # likewise, to write a strike down

FAILED = Condition(
    "accusation-test",
    "FAIL",
    "node",
    "service",
    "a job reported the node, and a test of [accusations] failed",
)
BROKEN = Condition(
    "accusation-test-error",
    "WARN",
    "tool",
    "none",
    "a test of [accusations] could not be completed",
)
LEMON = Condition(
    "lemon",
    "FAIL",
    "node",
    "service",
    "jobs of different users failed here repeatedly ([lemon]), but every check passes",
)


class Inquiry:
    """The inquiry of one run of the gate into the reports against this node."""

    def __init__(self, settings: Settings, system: System) -> None:
        self._settings = settings
        self._system = system
        self._claim: int | None = None
        self._dealt: dict[int, JobNote] = {}
        self._found: list[AcceptedReport] = []
        self._told: list[str] = []
        self._tested = False  # the site's own tests were run, and all passed
        self.behind: list[AcceptedReport] = []  # the reports that close the gate, if it is closed
        self.events: list[Event] = []  # to be recorded
        self.errors: list[str] = []  # to be said

    @property
    def reported(self) -> bool:
        return bool(self._found)

    @property
    def _spool(self) -> str:
        return str(self._settings.gate["spool"])

    def find(self, which: Sequence[JobNote], until: float) -> None:
        """Find the reports of these jobs' users, until ``until`` (monotonic seconds)."""
        if not which:
            return
        try:
            self._claim = claim(self._spool)
        except OSError as error:
            self.errors.append(f"reports against the node are not verified: {error}")
            return
        if self._claim is None:
            return
        if not answers(self._settings.state_dir):
            return  # ``Gate.judge`` tells of it
        self._find(which, until)

    def _find(self, which: Sequence[JobNote], until: float) -> None:
        """Look into the directories of these jobs: only time ends it, never a user's directory."""
        node, state_dir = self._system.context.node, self._settings.state_dir
        share = 2 if len({note.uid for note in which}) > 1 else 1  # so that others have some left
        silent: set[int] = set()
        told: set[str] = set()
        for note, job in [(one, job) for one in which for job in one.reporting_jobs]:
            left = until - time.monotonic()
            if left <= 0:
                return
            if job.uid in silent:
                continue
            found, failed = find(state_dir, node, job, note.known, min(FIND_S, left / share))
            if not failed:
                self._take(note, job, found)
                continue
            if failed not in told and failed != AGAIN:
                self.errors.append(f"reports of job {job.of}: {failed}")
            told.add(failed)
            if failed.startswith("no answer") or failed == AGAIN:
                if not answers(f"{state_dir}/jobs"):
                    return  # the file system is dead: the others lie there too
                silent.add(job.uid)

    def _take(self, note: JobNote, job: ReportingJob, found: ReportsFound) -> None:
        names = [one.name for one in found.rejections] + self._withdraw(found.withdrawals)
        if not names and not found.reports:
            return
        self._dealt.setdefault(note.job, note)
        self._deal(note.job, *names)
        self._found += found.reports
        for rejection in found.rejections:
            self.events.append(self._event("rejected", of_rejection(rejection, job)))
            self.errors.append(
                f"rejected report {one_line(rejection.name)} in job {job.of} "
                f"(owner uid {rejection.uid}): {rejection.why}"
            )

    def _deal(self, job: int, *names: str) -> None:
        """Remember these files of a job as dealt with."""
        note = self._dealt[job]
        self._dealt[job] = note._replace(known=(*note.known, *names))

    def _withdraw(self, withdrawals: Sequence[Withdrawal]) -> list[str]:
        """Record the withdrawals of strikes; return the names of the files dealt with.

        The history has the strikes, one per job at most; while it is unreadable, none is dealt
        with.
        """
        known = self._history() if withdrawals else []
        if known is None:
            return []
        struck = {(e.data.get("job"), e.data.get("name")) for e in strikes_of(known)}
        for one in withdrawals:
            if (one.job, one.of) in struck:
                data = {"job": one.job, "uid": one.uid, "name": one.of, "why": one.why}
                self.events.append(self._event("withdrawn", data))
        return [name for one in withdrawals for name in (one.name, one.of)]

    def _history(self) -> list[Event] | None:
        try:
            return self._system.history()
        except OSError as error:
            self.errors.append(f"no history to count strikes in: {error}")
            return None

    def test(self, free: bool, until: float) -> list[Finding]:
        """Run the site's tests, if anybody reported the node."""
        if not self._found:
            return []
        findings, self._told = run_tests(self._system, self._settings, free, until)
        self._tested = free and not findings and bool(self._settings.accusations["tests"])
        return findings

    def conclude(self, verdict: Verdict) -> list[Finding]:
        """Confirm or clear the reports by checks and tests; return the lemon finding, if any."""
        if not self._found:
            return []
        against = [finding for finding in verdict.closing if finding.cls == "node"]
        why = [f"{f.check}: {f.evidence}"[:300] for f in against[:5]] + self._told
        # With what this run has found withdrawn: that is not in the history yet.
        known = [*(self._history() or []), *self.events]
        fresh: list[Event] = []
        self.behind = list(self._found) if against else []
        for report in self._found:
            result = "confirmed" if against else "cleared"
            data = of_report(report, result, why)
            if self._tested and not against:
                data["tested"] = True
            self.events.append(self._event("accusation", data))
            self._deal(report.job, report.name)
            if not against and not struck([*known, *fresh], report.job):
                fresh += self._strike(report.job, data)
        self.events += fresh
        now = time.time()
        found = lemon([*known, *fresh], self._settings, now, self._system.boot_id())
        if not found or not fresh:
            return []
        self.behind = [*self.behind, *(one for one in self._found if one not in self.behind)]
        return [found]

    def _strike(self, job: int, data: dict[str, Any]) -> list[Event]:
        """One strike of this job, unless it has struck its share of nodes already."""
        note = self._dealt[job]
        table, context = self._settings.lemon, self._system.context
        most = max(1, note.nodes // max(1, int(table["nodes_per_strike"])))
        state_dir = self._settings.state_dir
        allowed, failed = call_on(
            state_dir,
            lambda: strikes.claim(state_dir, job, context.node, most, time.time()),
            STRIKE_S,
        )
        if allowed:
            more = {"account": note.account} if note.account else {}
            return [self._event("strike", {**data, **more})]
        why = (
            failed
            or f"the job has {counted(note.nodes, 'node')} and has already given strikes to "
            f"{counted(most, 'node')}"
        )
        self.errors.append(f"job {job} gives this node no strike: {why}")
        return []

    def close(self, *, recorded: bool) -> None:
        """Mark the reports as handled if the events were recorded; else the next sweep retries."""
        for note in self._dealt.values() if recorded else ():
            try:
                save(self._spool, note)
            except OSError as error:
                self.errors.append(f"not marked as handled: {error}")
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _event(self, kind: str, data: dict[str, Any]) -> Event:
        return Event(round(time.time(), 6), kind, self._system.boot_id(), data)


# -- what is found ----------------------------------------------------------------------------


def run_tests(
    system: System, settings: Settings, free: bool, until: float
) -> tuple[list[Finding], list[str]]:
    """The site's own tests of a reported node: findings, and what is worth telling.

    ``free``: no job runs here. ``until``: monotonic seconds. A test that fails closes; one that
    breaks does not: it says nothing about the node.
    """
    tests: Sequence[str] = settings.accusations["tests"]
    if tests and not free:
        return [], ["the tests of [accusations] were skipped: another job runs here"]
    until = min(until, time.monotonic() + float(settings.accusations["deadline"]))
    findings: list[Finding] = []
    for test in tests:
        left = until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError(0, "no time was left for it")
            output = system.command([test], left)
        except OSError as error:
            findings.append(BROKEN.found(f"{test}: {error.strerror or error}"))
            continue
        said = one_line((output.out.strip() or output.err.strip())[-300:])
        if output.code == 1:
            findings.append(FAILED.found(f"{test}: {said or 'exit code 1'}"))
        elif output.code != 0:
            findings.append(BROKEN.found(f"{test}: exit code {output.code}: {said}"))
    return findings, [f"{len(tests)} tests of [accusations] were run"] if tests else []


def lemon(events: Iterable[Event], settings: Settings, now: float, boot: str) -> Finding | None:
    """The finding on a node that failed jobs of enough users; None if it is no lemon. Pure."""
    table = settings.lemon
    rules = StateRules(
        strikes=int(table["strikes"]),
        users=int(table["users"]),
        accounts=int(table["accounts"]),
        lemon_days=table["window_days"],
    )
    evidence = node_state(events, now, boot, rules=rules).lemon
    return LEMON.found(evidence) if evidence else None


def struck(events: Iterable[Event], job: int) -> bool:
    """True if this job has a strike against the node already: it gets one only. Pure."""
    return any(event.data.get("job") == job for event in strikes_of(events))


def acquitted(events: Sequence[Event], settings: Settings, drained: float) -> bool:
    """True if a lemon, drained then, is none without the reports withdrawn since. Pure.

    Judged as of then: strikes that have grown old meanwhile acquit nobody.
    """
    taken_back = any(event.kind == "withdrawn" and event.time >= drained for event in events)
    return taken_back and lemon(events, settings, drained, "") is None


def of_report(report: AcceptedReport, result: str, why: Sequence[str]) -> dict[str, Any]:
    """The data of an event on a report that was followed up."""
    return {
        "job": report.job,
        "uid": report.uid,
        "check": report.symptom,
        "said": list(report.evidence),
        "name": report.name,
        "rule": report.rule,
        "seen": report.time,
        "result": result,
        "why": list(why),
    }


def of_rejection(rejection: Rejection, job: ReportingJob) -> dict[str, Any]:
    """The data of an event on what was no report: whose job's, who left it, and why not."""
    return {
        "job": job.job,
        "uid": job.uid,
        "of": job.of,
        "name": one_line(rejection.name),
        "owner": rejection.uid,
        "why": rejection.why,
    }
