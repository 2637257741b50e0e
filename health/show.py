"""Reports for people and for programs. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence

from health.check import PLACES, Check
from health.finding import ACTIONS, Finding
from health.gate.verdict import Verdict
from health.run.report import GateReport
from robust_slurm.text import counted, shown

_COLOURS = {"PASS": "32", "WARN": "33", "ERROR": "35", "FAIL": "31"}  # ANSI


def as_json(report: GateReport, verdict: Verdict) -> str:
    return json.dumps({**report.as_dict(), "verdict": verdict.as_dict()}, indent=1)


def table(report: GateReport, verdict: Verdict, colour: bool) -> str:
    """One line per family, its findings below it, the verdict at the end.

    Evidence is text of others: names of processes, mounts and jobs.
    """
    job = f", job {report.job}" if report.job else ""
    families = len([row for row in report.ran if row.status not in ("disabled", "not-run")])
    lines = [
        f"{report.node}, {report.where}{job}: {counted(families, 'family', 'families')}, "
        f"{report.total_ms:.0f} ms",
        "",
    ]
    by_family = _by_family(report)
    lines += [_finding(finding, colour) for finding in by_family.pop("", [])]
    for row in report.ran:
        lines.append(f"{_status(row.status, colour)} {row.ms:8.1f} ms  {row.family}")
        lines += [_finding(finding, colour) for finding in by_family.get(row.family, [])]
    if report.disabled:
        lines += ["", f"switched off by the site: {', '.join(report.disabled)}"]
    lines += ["", *_verdict(verdict, colour)]
    return "\n".join(lines)


def _by_family(report: GateReport) -> dict[str, list[Finding]]:
    """Findings below the family that ran; what belongs to none below ""."""
    from health.checks import ALL

    owner = {condition.check: check.name for check in ALL for condition in check.conditions}
    names = sorted((row.family for row in report.ran), key=len, reverse=True)
    out: dict[str, list[Finding]] = {}
    for finding in report.findings:
        family = owner.get(finding.check, "")
        if not family:  # "<family>-hung", and ids with a number in them: "xid-79"
            family = next((name for name in names if finding.check.startswith(f"{name}-")), "")
        out.setdefault(family, []).append(finding)
    return out


def _status(status: str, colour: bool) -> str:
    text = f"{status:<8}"
    return f"\x1b[{_COLOURS[status]}m{text}\x1b[0m" if colour and status in _COLOURS else text


def _finding(finding: Finding, colour: bool) -> str:
    device = f" {shown(finding.device)}" if finding.device else ""
    action = f" -> {finding.action}" if finding.action != "none" else ""
    head = f"  {_status(finding.status, colour)}{finding.check}{device} ({finding.cls}){action}"
    return f"{head}\n           {shown(finding.evidence)}"


def _verdict(verdict: Verdict, colour: bool) -> list[str]:
    if not verdict.lead:
        return [f"{_status('PASS', colour).rstrip()}: open, the node takes jobs"]
    count = f", {len(verdict.closing)} findings close it" if len(verdict.closing) > 1 else ""
    lines = [
        f"{_status(verdict.lead.status, colour).rstrip()}: closed{count}",
        f"reason: {shown(verdict.reason)}",
    ]
    if verdict.lead.action != "none":
        lines.append(f"next:   {ACTIONS[verdict.lead.action].text}")
    return [*lines, f"more:   robust-health explain {verdict.lead.check}"]


def listing(checks: Sequence[Check]) -> str:
    """Every family with its conditions."""
    lines = []
    for check in checks:
        places = ",".join(place for place in PLACES if place in check.where)
        closes = "ERROR closes" if check.closes_on_error else "ERROR does not close"
        lines.append(
            f"{check.name:<16} {check.cost_ms:g} ms, deadline {check.deadline_s:g} s; "
            f"{places}; {closes}"
        )
        for row in check.conditions:
            what = f"{row.status} {row.cls}"
            lines.append(f"    {row.check:<26} {what:<11} {row.action:<16} {row.when}")
    return "\n".join(lines)


def listing_json(checks: Sequence[Check]) -> str:
    rows = [
        {
            "family": check.name,
            "cost_ms": check.cost_ms,
            "deadline_s": check.deadline_s,
            "where": [place for place in PLACES if place in check.where],
            "closes_on_error": check.closes_on_error,
            "needs_nvml": check.needs_nvml,
            "conditions": [
                {
                    "id": row.check,
                    "status": row.status,
                    "class": row.cls,
                    "action": row.action,
                    "when": row.when,
                }
                for row in check.conditions
            ],
            "settings": {
                key: {"default": setting.default, "unit": setting.unit, "help": setting.help}
                for key, setting in check.settings.items()
            },
        }
        for check in checks
    ]
    return json.dumps(rows, indent=1)
