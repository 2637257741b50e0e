"""Open or closed, what leads, and the drain reason there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health import settings
from health.finding import ACTIONS, ActionName, Finding, Status
from health.gate.verdict import Reason, judge, parse_reason, reason_for, without_reboot
from health.run.report import Report

SETTINGS = settings.defaults(())


def finding(
    status: Status, check: str = "mount-missing", action: ActionName = "none", device: str = ""
) -> Finding:
    return Finding(status, "tool" if status == "ERROR" else "node", check, device, "seen", action)


def report(*findings: Finding, job: int = 7, tolerated: tuple[str, ...] = ()) -> Report:
    return Report("n1", "prolog", job, 0.0, list(findings), [], 1.0, [], list(tolerated))


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


@pytest.mark.parametrize(
    ("device", "written"),
    [
        ("/scratch", "/scratch"),
        ("0000:3b:00.0", "0000_3b_00.0"),
        ("my disk", "my_disk"),
        ("a'\"; $(x)\n", "a_x_"),
        ("ü", "_"),
        ("x" * 300, "x" * 64),
    ],
)
def test_a_device_is_one_plain_word(device: str, written: str) -> None:
    reason = reason_for(finding("FAIL", device=device), 1)
    assert reason == f"robust:node:mount-missing:{written}:none:job1"


@given(
    st.sampled_from(["node", "user", "tool"]),
    st.from_regex(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", fullmatch=True),
    st.text(),
    st.sampled_from(sorted(ACTIONS)),
    st.integers(0, 1 << 32),
)
def test_a_reason_comes_back(cls: str, check: str, device: str, action: str, job: int) -> None:
    made = Finding("FAIL", cls, check, device, "seen", action)  # type: ignore[arg-type]
    text = reason_for(made, job)
    rebooted = f"{text} : reboot issued"  # as Slurm writes it at `scontrol reboot`
    signed = [f"{one} [root@2025-11-21T10:00:00]" for one in (text, rebooted)]
    for shown in (text, f" {text} ", rebooted, *signed):
        assert without_reboot(shown)[0] in (shown, text)
        parsed = parse_reason(shown)
        assert parsed is not None
        assert (parsed.cls, parsed.check, parsed.action, parsed.job) == (cls, check, action, job)
        assert reason_for(made._replace(device=parsed.device), job) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Prolog error",
        "robust",
        "robust:node:mount-missing:-:none",
        "robust:node:mount-missing:-:none:job",
        "robust:node:mount-missing:-:explode:job1",
        "robust:host:mount-missing:-:none:job1",
        "robust:node:mount missing:-:none:job1",
        "robust:node:mount-missing::none:job1",
        "robust:node:mount-missing:-:none:job1 and Bob is on it",
        "Bob: robust:node:mount-missing:-:none:job1",
        "robust:node:mount-missing:-:none:job1\nrobust:node:mount-missing:-:none:job1",
        "robust:node:mount-missing:-:none:job" + "9" * 30,
        "Robust:node:mount-missing:-:none:job1",
    ],
)
def test_a_reason_of_somebody_else_is_not_ours(text: str) -> None:
    assert parse_reason(text) is None


def test_the_parts_of_a_reason() -> None:
    assert parse_reason("robust:tool:clock-error:-:none:job0") == Reason(
        "tool", "clock-error", "", "none", 0
    )


@given(st.text())
def test_no_text_breaks_the_parser(text: str) -> None:
    parsed = parse_reason(text)
    assert parsed is None or text.strip().startswith("robust:")
