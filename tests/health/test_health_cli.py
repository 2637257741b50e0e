"""robust-health: what it prints, its exit codes, and what it says to bad input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import health_site
import pytest
from health_site import finds, gpus

from health import checks, cli, commands, show
from health.check import Check
from health.checks import ALL, FAMILIES
from health.finding import Finding
from health.gate.verdict import Verdict
from health.run.report import GateReport, Ran

site = health_site.site


def test_an_open_node_is_0_and_a_closed_one_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch)
    assert cli.main(["check"]) == 0
    assert "PASS: open" in capsys.readouterr().out
    finds(monkeypatch, Finding("FAIL", "node", "disk-full", "/", "0 GiB", "reboot"))
    assert cli.main(["check", "--where", "prolog"]) == 1
    out = capsys.readouterr().out
    assert "n1, prolog" in out and "disk-full / (node) -> reboot" in out and "0 GiB" in out
    assert "reason: robust:node:disk-full:/:reboot:job0" in out and "\x1b" not in out


def test_json_has_every_family_with_its_milliseconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finds(monkeypatch, Finding("FAIL", "node", "disk-full", "/", "0 GiB", "none"))
    assert cli.main(["check", "--json", "--node", "gpu7"]) == 1
    out = json.loads(capsys.readouterr().out)
    assert out["node"] == "gpu7" and out["verdict"]["closed"] is True
    assert [(row["family"], row["status"]) for row in out["ran"]] == [("disk", "FAIL")]
    assert out["ran"][0]["ms"] >= 0 and out["total_ms"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["check", "--where", "nowhere"], "use one of prolog, epilog, sweep, deep"),
        (["check", "--only", "mount"], "no such family; did you mean mounts?"),
        (["check", "--only", "qqqq"], "see robust-health list"),
        (["check", "--only", "nvlink,gpu"], "did you mean gpu_count or gpu_recovery"),
        (["check", "--config", "/proc"], "--config /proc: Is a directory"),
        (["check", "--config", "/nowhere/robust.toml"], "No such file"),
        (["record", "/proc/tree"], "/proc/tree"),
        (["record", "/nowhere/at/all"], "/nowhere/at/all: No such file or directory; name a"),
        (["record", "/proc/self/status"], "is not a directory of ours"),
        (["replay", "/proc/self/status"], "is not a directory"),
        (["replay", "/nowhere"], "is not a directory"),
        (["replay", "/proc/self/fd"], "not a recording"),
        (["explain", "mountz"], "did you mean mounts"),
        (["explain", "qqqqqq"], "`robust-health list` shows all"),
        (["explain", "xid", "99999"], "Xid 99999: not in the catalogue"),
        (["explain", "sxid99999"], "SXid 99999: not in the catalogue"),
        (["repaired", "--reset", "gpu9"], "NVML shows no GPU"),
        (["baseline"], "NVML reports no GPU here"),
    ],
)
def test_bad_input_is_2_and_says_what_to_do(
    words: Sequence[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus(monkeypatch)
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err and err.startswith(f"robust-health {words[0]}")


@pytest.mark.parametrize("words", [[], ["nonsense"], ["check", "--nonsense"], ["replay"]])
def test_a_wrong_command_line_is_2(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert "Options: robust-health" in capsys.readouterr().err


def test_a_family_that_does_not_run_there_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = Check("disk", lambda system: [], (), {}, frozenset({"sweep", "deep"}))
    monkeypatch.setattr(commands, "ALL", (mine,))
    assert cli.main(["check", "--where", "prolog", "--only", "disk"]) == 2
    assert "it runs in sweep, deep" in capsys.readouterr().err


def test_list_names_every_family_and_condition(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list"]) == 0
    text = capsys.readouterr().out
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["family"] for row in rows] == [check.name for check in ALL]
    for check in ALL:
        assert f"\n{check.name} " in f"\n{text}"
        for condition in check.conditions:
            assert condition.check in text


def test_every_family_can_be_imported() -> None:
    broken = [check.name for check in ALL if not check.conditions]
    assert broken == [] and [check.name for check in ALL] == list(FAMILIES)
    ids = [condition.check for check in ALL for condition in check.conditions]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("fault", [ModuleNotFoundError, SyntaxError, TypeError])
def test_a_family_that_cannot_be_imported_keeps_the_gate_closed(
    fault: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(name: str) -> ModuleType:
        raise fault("broken")

    monkeypatch.setattr(checks, "import_module", broken)
    monkeypatch.setattr(commands, "ALL", (checks.load("disk"),))
    assert cli.main(["check"]) == 1
    out = capsys.readouterr().out
    assert "disk-error" in out and "cannot be imported" in out


def test_colours_only_where_they_are_wanted() -> None:
    finding = Finding("WARN", "tool", "config-unusable", "", "bad key", "none")
    report = GateReport(
        "n1",
        "deep",
        5,
        0.0,
        [finding, finding._replace(check="xid-79", device="gpu3")],
        [Ran("xid", 1.0, "WARN"), Ran("disk", 0.0, "disabled")],
        2.0,
        ["disk"],
        [],
    )
    plain = show.table(report, Verdict(False, (), ""), False)
    coloured = show.table(report, Verdict(False, (), ""), True)
    assert "\x1b" not in plain and "\x1b[33mWARN" in coloured
    assert plain.index("config-unusable") < plain.index("ms  xid") < plain.index("xid-79")
    assert "switched off by the site: disk" in plain and "job 5" in plain


def test_the_sweep_gets_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ModuleType("health.sweep")
    heard: list[list[str]] = []
    sweep.main = lambda words: heard.append(words) or 1  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "health.sweep", sweep)
    monkeypatch.setattr("health.sweep", sweep, raising=False)
    assert cli.main(["sweep", "--dry-run"]) == 1
    assert heard == [["--dry-run"]]


def test_a_person_who_is_not_root_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(system: Any) -> list[Finding]:
        raise PermissionError(1, "Operation not permitted", "/dev/kmsg")

    monkeypatch.setattr(commands, "ALL", (Check("xid", closed, (), {}),))
    monkeypatch.setattr(commands.os, "geteuid", lambda: 1000)
    assert cli.main(["check"]) == 1
    assert "not root" in (err := capsys.readouterr().err) and "xid-error" in err
