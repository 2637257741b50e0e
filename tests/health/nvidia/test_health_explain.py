"""robust-health explain: every family, condition, Xid and SXid has its words."""

from __future__ import annotations

from pathlib import Path

import health_site
import pytest

from health import cli
from health.check import Check
from health.checks import ALL
from health.nvidia.xid_catalog import SXIDS, XIDS

site = health_site.site


@pytest.mark.parametrize("topic", ["79", "xid79", "Xid 79", "xid-79", "XID79"])
def test_an_xid_is_explained(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", *topic.split()]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Xid 79 (") and "action here: reboot" in out


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("mounts-hung", "did not finish within its deadline"),
        ("gpu-count-error", "The check itself failed"),
        ("gate-deadline", "the time for all checks"),
        ("gate-crashed", "the gate itself failed"),
        ("config-unusable", "cannot be used"),
        ("sxid10003", "SXid 10003 (NVSwitch)"),
        ("10003", "SXid 10003 (NVSwitch)"),
    ],
)
def test_what_has_no_page_of_its_own_is_explained(
    topic: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", topic]) == 0
    assert said in capsys.readouterr().out


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_every_family_and_condition_is_explained(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", check.name]) == 0
    page = capsys.readouterr().out
    assert page.startswith("#")
    for condition in check.conditions:
        if any(c.isdigit() for c in condition.check.partition("-")[2]):
            continue  # "xid-79" is explained as an Xid
        assert cli.main(["explain", condition.check]) == 0
        assert condition.when in capsys.readouterr().out


def test_every_xid_and_sxid_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for code, row in XIDS.items():
        assert cli.main(["explain", str(code)]) == 0
        assert f"Xid {code} ({row[0]}): {row[1]}" in capsys.readouterr().out
    for code, (kind, _, meaning) in SXIDS.items():
        assert cli.main(["explain", f"sxid{code}"]) == 0
        out = capsys.readouterr().out
        assert f"SXid {code} (NVSwitch): {meaning}" in out and f"kind: {kind}" in out


@pytest.mark.parametrize("check", ALL, ids=lambda check: str(check.name))
def test_what_the_runner_finds_in_a_family_is_explained(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    for suffix in ("hung", "error", "many"):
        for word in (f"{check.name}-{suffix}", f"{check.name}-{suffix}".replace("_", "-")):
            assert cli.main(["explain", word]) == 0
            assert f"# {check.name}" in capsys.readouterr().out


def test_a_page_that_is_not_installed_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("health.explain.PAGES", tmp_path)
    assert cli.main(["explain", "disk"]) == 0
    assert "disk.md cannot be read: No such file" in capsys.readouterr().out
