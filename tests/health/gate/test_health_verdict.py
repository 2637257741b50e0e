"""The verdict: open or closed, the finding that leads, and its drain reason."""

from __future__ import annotations

import pytest

from health import settings
from health.finding import Finding, Status
from health.gate.verdict import judge, reason_for
from health.run.report import GateReport
from robust_slurm.drain_reason import ActionName

SETTINGS = settings.defaults(())


def finding(
    status: Status, check: str = "mount-missing", action: ActionName = "none", device: str = ""
) -> Finding:
    return Finding(status, "tool" if status == "ERROR" else "node", check, device, "seen", action)


def report(*findings: Finding, job: int = 7, tolerated: tuple[str, ...] = ()) -> GateReport:
    return GateReport("n1", "prolog", job, 0.0, list(findings), [], 1.0, [], list(tolerated))


@pytest.mark.parametrize(
    ("findings", "closed"),
    [
        ((), False),
        ((finding("PASS"),), False),
        ((finding("WARN"),), False),
        ((finding("ERROR", "clock-error"),), True),
        ((finding("ERROR", "load-error"),), False),
        ((finding("WARN"), finding("FAIL")), True),
        # Only an ERROR can be tolerated.
        ((finding("FAIL", "load-error"),), True),
    ],
)
def test_fail_closes_and_error_unless_it_is_tolerated(
    findings: tuple[Finding, ...], closed: bool
) -> None:
    verdict = judge(report(*findings, tolerated=("load-error",)), SETTINGS)
    assert verdict.closed is closed
    assert bool(verdict.reason) is closed and bool(verdict.lead) is closed


@pytest.mark.parametrize("status", ["FAIL", "ERROR"])
def test_what_the_site_switched_off_closes_nothing(status: Status) -> None:
    off = SETTINGS._replace(gate={**SETTINGS.gate, "disabled": ["mount-missing"]})
    assert not judge(report(finding(status)), off).closed


def test_the_hardest_action_leads_then_fail_then_the_order() -> None:
    first, second = finding("FAIL", "a"), finding("FAIL", "b")
    unknown = finding("ERROR", "c", "service")
    reset, reboot = finding("FAIL", "d", "reset-gpu"), finding("FAIL", "e", "reboot")
    verdict = judge(report(finding("WARN", "w", "service"), first, reset, second, reboot), SETTINGS)
    assert [f.check for f in verdict.closing] == ["e", "d", "a", "b"]
    assert judge(report(finding("ERROR", "x"), first), SETTINGS).lead == first
    assert judge(report(reboot, unknown), SETTINGS).lead == unknown


def test_the_reason_names_everything() -> None:
    lost = Finding("FAIL", "node", "gpu-lost", "gpu3", "NVML: lost", "reboot")
    assert judge(report(lost), SETTINGS).reason == "robust:node:gpu-lost:gpu3:reboot:job7"
    assert reason_for(lost._replace(device=""), 0) == "robust:node:gpu-lost:-:reboot:job0"
