"""The site's own commands: what their ends mean, their time, and whose they must be."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from fake_system import FakeSystem, context
from gate_site import GateSite
from job_leftovers import OTHER, needs_root

from health.checks.host import site as family
from health.finding import Finding
from health.node.system import CommandOutput
from health.run.live import LiveSystem
from health.run.live import context as live_context
from health.settings import load
from health.settings_file import END
from health.settings_merge import COMMAND, Commands, fit

ARGV = ["/usr/local/sbin/check-home", "-q"]


def system(answer: CommandOutput | OSError, place: str = "prolog", **more: Any) -> FakeSystem:
    commands = {"home": {**COMMAND, "argv": ARGV, **more}}
    return FakeSystem(
        commands={tuple(ARGV): answer},
        context=context(place),
        options={"site": {"commands": commands}},
    )


FAIL = Finding("FAIL", "node", "site-check", "home", f"{ARGV[0]}: exit code 1: no home", "none")


def warn(text: str) -> Finding:
    return Finding("WARN", "tool", "site-check-unknown", "home", f"{ARGV[0]}: {text}", "none")


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (CommandOutput(0, "all well", ""), []),
        (CommandOutput(1, "\n no\thome \nmore\n", ""), [FAIL]),
        (CommandOutput(1, "", "no home"), [FAIL]),
        (CommandOutput(1, "", ""), [FAIL._replace(evidence=f"{ARGV[0]}: exit code 1")]),
        (CommandOutput(127, "", "not found"), [warn("exit code 127: not found")]),
        (CommandOutput(-11, "", ""), [warn("exit code -11")]),
        (TimeoutError(errno.ETIMEDOUT, "did not end within 1 s"), [warn("did not end within 1 s")]),
        (PermissionError(1, "belongs to uid 7"), [warn("belongs to uid 7")]),
    ],
)
def test_how_a_command_ends(answer: CommandOutput | OSError, found: list[Finding]) -> None:
    assert family.CHECK.run(system(answer)) == found


def test_class_and_action_are_the_sites() -> None:
    (found,) = family.CHECK.run(system(CommandOutput(1, "", ""), action="reboot"))
    assert (found.cls, found.action) == ("node", "reboot")
    (found,) = family.CHECK.run(system(CommandOutput(1, "", ""), **{"class": "user"}))
    assert found.cls == "user"


@pytest.mark.parametrize(
    ("where", "runs"), [("prolog", True), ("epilog", False), ("sweep", False), ("deep", True)]
)
def test_where_it_runs(where: str, runs: bool) -> None:
    assert bool(family.CHECK.run(system(CommandOutput(1, "", ""), where, where=["prolog"]))) is runs


def test_all_together_have_a_time() -> None:
    one = system(CommandOutput(1, "", ""))
    options = {**one.options("site"), "prolog_deadline": 0.0}
    one = FakeSystem(options={"site": options}, context=context("prolog"))
    assert family.CHECK.run(one) == [warn("no time was left for it")]


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        ({"home": {"argv": ["/bin/true"]}}, ""),
        ({"home": {"argv": ["/bin/true", "x y"], "where": ["sweep"], "deadline": 3}}, ""),
        ({"home": {"argv": "/bin/true"}}, "home: argv: not a list of strings"),
        ({"home": {"argv": []}}, "home: argv: not a list of strings"),
        ({"home": {"argv": ["true"]}}, "home: argv: 'true' is not an absolute path"),
        ({"home": {"argv": ["/bin/true"], "deadline": 0}}, "home: deadline: must be above 0"),
        ({"home": {"argv": ["/bin/true"], "where": ["deep"]}}, "home: where: use prolog"),
        ({"home": {"argv": ["/bin/true"], "class": "tool"}}, "home: class: use node, user"),
        ({"home": {"argv": ["/bin/true"], "action": "burn"}}, "home: action: 'burn' is none of"),
        ({"home": {"argv": ["/bin/true"], "shell": True}}, "home: unknown: shell"),
        ({"Home!": {"argv": ["/bin/true"]}}, "Home!: a name may have lower-case letters"),
        ({"home": 3}, "home: not a table"),
        (["/bin/true"], "not a table"),
    ],
)
def test_settings(value: Any, wrong: str) -> None:
    found, why = fit(value, Commands())
    assert why.startswith(wrong) and bool(why) is bool(wrong)
    if not wrong:
        assert found["home"]["class"] == "node"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@needs_root
def test_only_what_is_roots_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GateSite(tmp_path, monkeypatch)
    ran = tmp_path / "ran"
    program = script(tmp_path / "check", f"touch {ran}; exit 1")
    toml = tmp_path / "site.toml"
    toml.write_text(f"[health.site.commands.own]\nargv = ['{program}']\n{END}\n")
    toml.chmod(0o644)
    found = load(str(toml), "n1", [family.CHECK])
    assert not found.problems
    live = LiveSystem(found, live_context("sweep", {}))
    for change in (lambda: program.chmod(0o775), lambda: os.chown(program, OTHER, OTHER)):
        change()
        (finding,) = family.CHECK.run(live)
        assert finding.status == "WARN" and not ran.exists()
        os.chown(program, 0, 0)
        program.chmod(0o755)
    (finding,) = family.CHECK.run(live)
    assert finding.status == "FAIL" and ran.exists()
