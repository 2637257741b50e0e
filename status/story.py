"""The suspicions against a node, joined from the records of jobs and of the node gate. Pure.

A suspicion is one report of a job against the node, one drain that the gate placed by itself, one
replacement without a report, or one warning that the node makes a job slow. The records are
hostile text, cleaned when they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from robust_slurm.drain_reason import parse_reason
from robust_slurm.state_dir.files import JobRecord
from robust_slurm.state_dir.node_events import NodeEvent
from robust_slurm.state_dir.records import IncidentRecord, NodeReport
from status import wording
from status.by_node import left, warned

Source = Literal["job", "gate"]
Verdict = Literal[
    "confirmed", "cleared", "withdrawn", "refused", "open", "drained", "unreported", "warned"
]
RUN_S = 300.0  # all events of one run of the gate lie within
LATE_S = 7200.0  # the gate looks for a report until an hour after the job's end


@dataclass(frozen=True)
class StoryLine:
    """One thing that happened; ``time``: seconds since 1970."""

    time: float
    text: str


@dataclass(frozen=True)
class Suspicion:
    """One suspicion and what became of it; ``verdict``: see docs/robust-status.md."""

    node: str
    source: Source
    job_id: int  # as the report and the gate name it; 0: a drain outside of a job
    of_job: int  # the job in whose directory the report lies: another one for a standby node
    uid: int  # of the job's user; -1: not known
    user: str  # as the report says
    incident: str
    rule: str  # id of the rule of diagnosis, or of the gate's check; "" in older records
    symptom: str
    time: float
    verdict: Verdict
    evicted: bool  # another node took its ranks, or the job was requeued without it
    progressed: bool  # and the job made steps after that
    drained: str  # the reason of a drain that followed and stands, as far as the records tell
    lines: tuple[StoryLine, ...]

    @property
    def reported(self) -> bool:
        return self.source == "job" and self.verdict not in ("unreported", "warned")


@dataclass
class _Draft:
    """A suspicion while its records are joined."""

    node: str
    source: Source
    job_id: int
    time: float
    of_job: int = 0
    uid: int = -1
    user: str = ""
    incident: str = ""
    rule: str = ""
    symptom: str = ""
    gate: Literal["", "confirmed", "cleared", "refused"] = ""
    looked: float | None = None  # when the gate gave that verdict
    withdrawn: bool = False
    reported: bool = True
    warned: bool = False
    evicted: bool = False
    progressed: bool = False
    drains: list[NodeEvent] = field(default_factory=list)  # that stand
    lines: list[StoryLine] = field(default_factory=list)

    def add(self, time: float, *texts: str) -> None:
        self.lines += [StoryLine(time, text) for text in texts]

    @property
    def verdict(self) -> Verdict:
        """The verdict; the finding of a check or a test outweighs a withdrawal (decision 25)."""
        if self.source == "gate":
            return "drained"
        if not self.reported:
            return "warned" if self.warned else "unreported"
        if self.gate == "confirmed":
            return "confirmed"
        return "withdrawn" if self.withdrawn else self.gate or "open"

    def done(self) -> Suspicion:
        return Suspicion(
            node=self.node,
            source=self.source,
            job_id=self.job_id,
            of_job=self.of_job or self.job_id,
            uid=self.uid,
            user=self.user,
            incident=self.incident,
            rule=self.rule,
            symptom=self.symptom,
            time=self.time,
            verdict=self.verdict,
            evicted=self.evicted,
            progressed=self.progressed,
            drained=self.drains[-1].reason or "unknown" if self.drains else "",
            lines=tuple(sorted(self.lines, key=lambda line: line.time)),
        )


def suspicions(
    node: str, jobs: Iterable[JobRecord], events: Iterable[NodeEvent]
) -> list[Suspicion]:
    """Join all that is known of a node, oldest first."""
    join = _Join(node)
    for job in jobs:
        join.job(job)
    for event in sorted(events, key=lambda event: event.time):
        join.event(event)
    return sorted((draft.done() for draft in join.drafts), key=lambda one: one.time)


def proven_good(events: Iterable[NodeEvent]) -> float:
    """Time of the newest proof that the node is good; 0.0 if there is none.

    A proof is an undrain, a person's word, or a passed burn-in or test. Passed checks alone are
    none: a lemon passes them too.
    """
    times = [
        event.time
        for event in events
        if event.kind in ("undrain", "repaired")
        or (event.kind in ("burn-in", "active-run") and event.result == "passed")
        or (event.kind == "accusation" and event.result == "cleared" and event.tested)
    ]
    return max(times, default=0.0)


class _Join:
    def __init__(self, node: str) -> None:
        self._node = node
        self.drafts: list[_Draft] = []
        self._reports: dict[tuple[int, str], list[_Draft]] = {}  # by job and incident

    # -- what jobs say

    def job(self, job: JobRecord) -> None:
        known = set()
        for report in (one for one in job.reports if one.node == self._node):
            incident = _incident_of(report, job.incidents)
            known.add(id(incident))
            self._add(self._report(job, report, incident))
        for incident in job.incidents:
            if id(incident) not in known and self._node in left(incident):
                self.drafts.append(self._unreported(job, incident))
            elif id(incident) not in known and self._node in warned(incident):
                self.drafts.append(self._warned(job, incident))

    def _add(self, draft: _Draft) -> None:
        self.drafts.append(draft)
        self._reports.setdefault((draft.job_id, draft.incident), []).append(draft)

    def _report(
        self, job: JobRecord, report: NodeReport, incident: IncidentRecord | None
    ) -> _Draft:
        draft = _Draft(self._node, "job", report.job_id, report.time)
        draft.of_job, draft.uid, draft.user = job.job_id, job.uid, report.user
        draft.incident, draft.symptom = report.incident, report.symptom
        draft.rule = report.rule or (incident.rule if incident else "")
        draft.add(report.time, *wording.report(report, draft.rule))
        if incident is not None:
            self._evicted(draft, job, incident)
        if report.withdrawn:
            draft.withdrawn = True
            when = report.time if report.withdrawn_at is None else report.withdrawn_at
            draft.add(when, wording.withdrawn(report))
        return draft

    def _unreported(self, job: JobRecord, incident: IncidentRecord) -> _Draft:
        draft = _Draft(self._node, "job", job.job_id, incident.time, reported=False)
        draft.of_job, draft.uid, draft.incident = job.job_id, job.uid, incident.id
        draft.rule, draft.symptom = incident.rule, incident.symptom
        draft.add(incident.time, wording.unreported(job.job_id, self._node, incident))
        self._evicted(draft, job, incident)
        return draft

    def _warned(self, job: JobRecord, incident: IncidentRecord) -> _Draft:
        draft = _Draft(self._node, "job", job.job_id, incident.time, reported=False, warned=True)
        draft.of_job, draft.uid, draft.incident = job.job_id, job.uid, incident.id
        draft.rule, draft.symptom = incident.rule, incident.symptom
        draft.add(incident.time, *wording.warned(job.job_id, self._node, incident))
        return draft

    def _evicted(self, draft: _Draft, job: JobRecord, incident: IncidentRecord) -> None:
        draft.evicted = self._node in left(incident)
        draft.progressed = progressed(job, incident)
        draft.add(incident.time, *wording.counters(self._node, incident))
        draft.add(incident.time, *wording.tests(incident))
        if draft.evicted:
            draft.add(incident.time, wording.evicted(job.job_id, self._node, incident))
        draft.add(_end(incident), wording.outcome(job.job_id, incident))

    # -- what the gate says

    def event(self, event: NodeEvent) -> None:
        {
            "accusation": self._looked,
            "rejected": self._rejected,
            "strike": self._strike,
            "withdrawn": self._dropped,
            "drain": self._drain,
            "undrain": self._undrain,
        }.get(event.kind, self._tested)(event)

    def _of(self, event: NodeEvent) -> _Draft | None:
        """The report that an event is about: by job and incident, else by node and time."""
        if event.report:
            same = self._reports.get((event.job_id, event.report), [])
            own = [d for d in same if -1 in (d.uid, event.uid) or d.uid == event.uid]
            return own[-1] if own else None
        near = [
            d
            for d in self.drafts
            if d.source == "job"
            and d.reported
            and event.job_id in (0, d.job_id)
            and 0 <= event.time - d.time <= LATE_S
        ]
        return max(near, key=lambda d: d.time, default=None)

    def _looked(self, event: NodeEvent) -> None:
        draft = self._of(event)
        if draft is None:  # the job's own records are gone
            draft = self._from_gate(event)
        draft.rule = draft.rule or event.rule
        draft.gate = "confirmed" if event.result == "confirmed" else "cleared"
        draft.looked = event.time
        draft.add(event.time, wording.looked(self._node, event))

    def _from_gate(self, event: NodeEvent) -> _Draft:
        time = event.time if event.seen is None else event.seen
        draft = _Draft(self._node, "job", event.job_id, time, uid=event.uid)
        draft.incident, draft.symptom, draft.rule = event.report, event.check, event.rule
        said = NodeReport(self._node, event.job_id, "", time, event.check, event.said, event.report)
        draft.add(time, *wording.report(said, event.rule))
        self._add(draft)
        return draft

    def _rejected(self, event: NodeEvent) -> None:
        if event.report and (draft := self._of(event)) is not None:
            draft.gate = draft.gate or "refused"
            draft.add(event.time, wording.refused(event))

    def _strike(self, event: NodeEvent) -> None:
        if (draft := self._of(event)) is not None:
            draft.add(event.time, wording.strike(event))

    def _dropped(self, event: NodeEvent) -> None:
        if (draft := self._of(event)) is not None:
            draft.withdrawn = True
            draft.add(event.time, wording.dropped(event))

    def _drain(self, event: NodeEvent) -> None:
        behind = self._behind(event)
        if not behind:
            draft = _Draft(self._node, "gate", event.job_id, event.time, uid=event.uid)
            draft.rule = draft.symptom = event.check
            self.drafts.append(draft)
            behind = [draft]
        for draft in behind:
            draft.drains.append(event)
            draft.add(event.time, *wording.drained(event))

    def _behind(self, event: NodeEvent) -> list[_Draft]:
        """The reports that led to a drain; older events do not name them."""
        looked = [d for d in self.drafts if d.looked is not None]
        if event.reports:
            return [d for d in looked if (d.job_id, d.incident) in event.reports]
        wanted = "cleared" if event.check == "lemon" else "confirmed"
        return [
            d
            for d in looked
            if d.gate == wanted
            and event.cls in ("", "node")
            and d.looked is not None
            and 0 <= event.time - d.looked <= RUN_S
        ]

    def _undrain(self, event: NodeEvent) -> None:
        drained = [d for d in self.drafts if d.drains]
        for draft in drained or self._drained_by_job(event):
            draft.drains.clear()
            draft.add(event.time, wording.undrained(self._node, event))

    def _drained_by_job(self, event: NodeEvent) -> list[_Draft]:
        """The report behind a drain by robust-srun itself (drain = direct), which has no event."""
        reason = parse_reason(event.reason)
        mine = [
            d
            for d in self.drafts
            if reason and reason.job and reason.job in (d.job_id, d.of_job) and d.time <= event.time
        ]
        if mine:
            return mine[-1:]
        draft = _Draft(self._node, "gate", reason.job if reason else 0, event.time)
        draft.rule = draft.symptom = reason.check if reason else ""
        self.drafts.append(draft)
        return [draft]

    def _tested(self, event: NodeEvent) -> None:
        """A test or a person's word: for the drains that stand, or for the report looked into."""
        told = [d for d in self.drafts if d.drains]
        if event.kind == "active-run" and event.why == ("accusation",):
            told = [d for d in self.drafts if d.looked and abs(event.time - d.looked) <= RUN_S]
        for draft in told:
            draft.add(event.time, wording.tested(self._node, event))


def _incident_of(report: NodeReport, incidents: Sequence[IncidentRecord]) -> IncidentRecord | None:
    """The incident of a report; a requeued job counts its incidents anew."""
    same = [one for one in incidents if one.id == report.incident and report.incident]
    return min(same, key=lambda one: abs(one.time - report.time), default=None)


def _end(incident: IncidentRecord) -> float:
    total, detect = incident.phases.get("total", 0.0), incident.phases.get("detect", 0.0)
    return incident.time + max(0.0, total - detect)


def progressed(job: JobRecord, incident: IncidentRecord) -> bool:
    """True if the job made steps after the incident."""
    if incident.outcome == "recovered":
        return True
    return incident.outcome == "requeued" and any(
        roster.step is not None and (roster.started or 0.0) > incident.time
        for roster in job.rosters
    )
