"""The report of one run of the checks."""

from __future__ import annotations

from typing import Any, NamedTuple

from health.finding import Finding, worst


class Ran(NamedTuple):
    """One family: what it took, and the worst that it found ("disabled", "not-run" else)."""

    family: str
    ms: float
    status: str


class GateReport(NamedTuple):
    """``tolerated``: ids of ERROR findings that do not close the gate; ``disabled``: what the
    site switched off of what would have run, families and ids of findings."""

    node: str
    where: str
    job: int
    time: float  # wall clock at the start, seconds since 1970
    findings: list[Finding]
    ran: list[Ran]
    total_ms: float
    disabled: list[str]
    tolerated: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        out: dict[str, Any] = self._asdict()
        out["findings"] = [finding.as_dict() for finding in self.findings]
        out["ran"] = [row._asdict() for row in self.ran]
        out["status"] = worst(self.findings)
        return out
