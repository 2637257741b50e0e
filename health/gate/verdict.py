"""Open or closed, and the drain reason that says why. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from health.finding import Finding, rung
from health.run.report import GateReport
from health.settings import Settings
from robust_slurm.drain_reason import Reason


class Verdict(NamedTuple):
    """``closing``: what closed the gate, the one that leads first; ``reason`` empty when open."""

    closed: bool
    closing: tuple[Finding, ...]
    reason: str

    @property
    def lead(self) -> Finding | None:
        return self.closing[0] if self.closing else None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "closed": self.closed,
            "reason": self.reason,
            "closing": [finding.as_dict() for finding in self.closing],
        }


def judge(report: GateReport, settings: Settings) -> Verdict:
    """Judge a report: any FAIL closes, and any ERROR except of checks that tolerate their own.

    Findings that the site switched off close nothing, also if the report has them.

    The hardest action leads: it cures the other findings too. Then FAIL before ERROR (known
    before unknown), then the order of the report.
    """
    off = set(settings.gate["disabled"])
    open_errors = off.union(report.tolerated)
    closing = [
        finding
        for finding in report.findings
        if (finding.status == "FAIL" and finding.check not in off)
        or (finding.status == "ERROR" and finding.check not in open_errors)
    ]
    closing.sort(key=lambda finding: (-rung(finding.action), finding.status == "ERROR"))
    reason = reason_for(closing[0], report.job) if closing else ""
    return Verdict(bool(closing), tuple(closing), reason)


def reason_for(finding: Finding, job: int) -> str:
    """Return the drain reason for a finding that a job's gate made; ``job`` 0: outside a job."""
    return Reason(finding.cls, finding.check, finding.device, finding.action, job).text
