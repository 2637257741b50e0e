"""The prolog: who is admitted, who is not, what is told to whom; and what it does not touch."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from gate_site import GateSite, finding
from places import REPOSITORY

from health.gate import gate as gate_module
from health.history.events import Unwritten
from health.sweep import main as sweep
from prolog.cli import asks_to_skip, main

pytestmark = pytest.mark.slow

REASON = "robust:node:broken:gpu3:reboot:job7"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GateSite:
    return GateSite(tmp_path, monkeypatch)


def test_a_healthy_node_admits_and_nothing_is_touched(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    assert site.slurm.calls == []
    assert not site.spool.exists() and list((site.state / "nodes").iterdir()) == []
    assert capfd.readouterr() == ("", "")


def test_a_broken_node_is_drained_with_the_reason(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.find(finding())
    assert main([]) == 1
    assert site.slurm.node()["reason"] == REASON
    first = capfd.readouterr().err.splitlines()[0]
    assert first == f"robust: {REASON} FAIL broken gpu3: it was seen to be broken"
    assert site.event("drain")["placed"] is True
    run = site.event("run")
    assert run["closed"] is True and run["did"] == "drained" and run["job"] == 7
    assert [row[0] for row in run["ran"]] == ["family"] and run["ran"][0][1] >= 0
    assert len(site.shared("drain", "run")) == 2


def test_a_warning_admits_and_is_recorded(site: GateSite) -> None:
    site.find(finding("WARN", "none"))
    assert main([]) == 0
    assert site.slurm.calls == []
    assert site.event("run")["closed"] is False
    assert site.shared() == []  # the sweep brings it there


def test_what_could_not_be_looked_at_closes(site: GateSite) -> None:
    site.find(finding("ERROR", "none", "tool"))
    assert main([]) == 1
    assert site.slurm.node()["reason"] == "robust:tool:broken:gpu3:none:job7"


def test_an_administrators_drain_is_kept_and_the_job_goes_elsewhere(site: GateSite) -> None:
    site.slurm.set(state="MIXED+DRAIN", reason="replace the fan")
    site.find(finding())
    assert main([]) == 1
    assert site.slurm.node()["reason"] == "replace the fan"
    assert site.events("drain") == []


def test_without_slurm_it_stays_closed_and_remembers(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.slurm.die()
    site.find(finding())
    assert main([]) == 1
    drain = site.event("drain")
    assert (drain["placed"], drain["as"]) == (False, "Prolog error")
    assert "unreachable" in capfd.readouterr().err


def test_beyond_the_breaker_the_job_runs_and_it_is_loud(
    site: GateSite, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.settings("[breaker]\nmax_nodes = 0\n")
    site.find(finding())
    monkeypatch.setattr(gate_module, "SYSLOG", str(site.path / "log"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as syslog:
        syslog.bind(str(site.path / "log"))
        assert main([]) == 0
        line = syslog.recv(4096).decode()
    assert line.startswith("<26>robust-slurm[") and "the circuit breaker is at its limit" in line
    assert site.slurm.drained == []
    assert "NOT drained, the circuit breaker is at its limit" in capfd.readouterr().err
    assert "circuit breaker" in site.event("run")["did"]
    assert site.events("drain") == []


def test_a_fault_of_the_whole_fleet_drains_no_more_than_allowed(site: GateSite) -> None:
    site.find(finding())
    codes = []
    for number in range(1, 9):
        site.environ(job=100 + number, node=f"n{number}")
        codes.append(main([]))
    assert sorted(codes) == [0] * 6 + [1] * 2  # 10 % of 20
    assert site.slurm.drained == ["n1", "n2"]


# -- what the site and the job may say --------------------------------------------------------


@pytest.mark.parametrize("how", ["setting", "flag", "environment"])
def test_dry_run(
    site: GateSite, how: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site.find(finding())
    if how == "setting":
        site.settings(gate="dry_run = true")
    if how == "environment":
        monkeypatch.setenv("ROBUST_DRY_RUN", "1")
    assert main(["--dry-run"] if how == "flag" else []) == 0
    assert site.slurm.calls == []
    assert f"would drain n1: {REASON}" in capfd.readouterr().err
    assert site.event("run")["dry_run"] is True
    assert site.events("drain") == []


def test_a_dry_run_survives_a_slip_in_the_file(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.settings(gate="dry_run = true")
    site.environ(job=0)
    assert sweep([]) == 0
    site.environ()
    site.find(finding())
    site.toml.write_text(site.toml.read_text() + "[breaker]\nmax_nodes =\n")
    calls = len(site.slurm.calls)
    assert main([]) == 0
    assert len(site.slurm.calls) == calls and site.slurm.drained == []
    assert f"would drain n1: {REASON}" in capfd.readouterr().err
    run = site.event("run")
    assert run["dry_run"] is True
    (told,) = [one for one in run["findings"] if one["check"] == "config-unusable"]
    assert told["status"] == "WARN" and "Invalid value (at line 11, column 12)" in told["evidence"]
    assert told["evidence"].endswith("are in force (robust.toml.last)")


@pytest.mark.parametrize(("words", "code"), [(["--help"], 0), (["-n"], 2), (["--dry-run", "x"], 2)])
def test_arguments_of_a_person(
    site: GateSite, words: list[str], code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    site.find(finding())
    assert main(words) == code
    told = capfd.readouterr()
    assert ("Options: " if code else "usage: ") + "robust-prolog" in (told.err or told.out)
    assert site.slurm.calls == [] and site.events("run") == []


def test_switched_off(site: GateSite) -> None:
    site.settings(gate="enabled = false")
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.calls == [] and not site.spool.exists()


@pytest.mark.parametrize("name", ["SLURM_JOB_COMMENT", "SLURM_JOB_EXTRA"])
def test_a_job_may_leave_the_checks_out(site: GateSite, name: str) -> None:
    site.find(finding())
    site.environ(**{name: "mine robust:skip"})
    assert main([]) == 0
    assert site.slurm.calls == []
    skip = site.event("skip")
    assert (skip["job"], skip["by"], skip["granted"]) == (7, name, True)


def test_unless_the_site_forbids_it(site: GateSite) -> None:
    site.settings(gate="allow_skip = false")
    site.find(finding())
    site.environ(SLURM_JOB_COMMENT="robust:skip")
    assert main([]) == 1
    assert site.slurm.node()["reason"] == REASON
    assert site.event("skip")["granted"] is False


@pytest.mark.parametrize(
    ("comment", "asked"),
    [
        ("robust:skip", True),
        ("a robust:skip b", True),
        ("a,robust:skip;b", True),
        ("robust:skipping", False),
        ("xrobust:skip", False),
        ("robust:skip:no", False),
        ("", False),
    ],
)
def test_the_word(comment: str, asked: bool) -> None:
    assert bool(asks_to_skip({"SLURM_JOB_COMMENT": comment})) == asked


# -- its own trouble --------------------------------------------------------------------------


def test_its_own_bug_closes_as_the_tools_fault(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    site.break_with(KeyError("nobody thought of this"))
    assert main([]) == 1
    assert site.slurm.node()["reason"] == "robust:tool:gate-crashed:-:none:job7"
    err = capfd.readouterr().err
    assert "KeyError" in err and "Traceback" in err
    assert "nobody thought" in site.event("crash")["error"]
    assert site.event("drain")["check"] == "gate-crashed"


def test_a_bug_everywhere_is_bound_by_the_breaker(site: GateSite) -> None:
    site.break_with(KeyError("everywhere"))
    codes = []
    for number in range(1, 5):
        site.environ(job=100 + number, node=f"n{number}")
        codes.append(main([]))
    assert codes == [1, 1, 0, 0]


def test_a_bug_before_the_settings_are_known(
    site: GateSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object) -> None:
        raise RuntimeError("no settings")

    monkeypatch.setattr(gate_module, "load", load)
    monkeypatch.setattr("health.gate.act.PLACES", str(site.slurm.bin))
    monkeypatch.setattr(
        "health.history.events.record", lambda *args, **more: Unwritten("", "")
    )  # the default spool is real
    assert main([]) == 1
    assert site.slurm.node()["reason"] == "robust:tool:gate-crashed:-:none:job7"


def test_bugs_of_bugs_are_left_to_the_stub(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site.break_with(KeyError("first"))
    monkeypatch.setattr(gate_module, "crashed", lambda *args: 1 / 0)
    assert main([]) == gate_module.UNLOADED
    assert "first" in capfd.readouterr().err


def test_a_gate_that_hangs_itself_is_woken(site: GateSite, monkeypatch: pytest.MonkeyPatch) -> None:
    site.settings(gate="")
    text = site.toml.read_text().replace("prolog_deadline = 20.0", "prolog_deadline = 0.2")
    site.toml.write_text(text.replace("scontrol_deadline = 10.0", "scontrol_deadline = 0.4"))
    monkeypatch.setattr(gate_module, "run", lambda *args, **more: time.sleep(60))
    began = time.monotonic()
    assert main([]) == 1
    assert time.monotonic() - began < 15
    assert "Late" in site.event("crash")["error"]


def test_one_that_hangs_again_in_its_last_words_is_left_to_the_stub(
    site: GateSite, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    site.break_with(KeyError("first"))
    monkeypatch.setattr(gate_module, "budget", lambda *args: 0.2)
    monkeypatch.setattr(gate_module, "_LAST_S", 0.5)
    monkeypatch.setattr(gate_module.Gate, "drain", lambda *args: time.sleep(60))
    began = time.monotonic()
    assert main([]) == gate_module.UNLOADED
    assert time.monotonic() - began < 15
    assert "then Late" in capfd.readouterr().err


def test_a_full_disk_changes_nothing(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    site.spool.write_text("a file where the directory should be")
    site.find(finding())
    assert main([]) == 1
    assert site.slurm.node()["reason"] == REASON
    assert "not recorded" in capfd.readouterr().err


def test_as_slurmd_starts_it(tmp_path: Path) -> None:
    """No PATH, no site-packages, closed streams: it answers, and says nothing but its findings."""
    stub = tmp_path / "prolog"
    stub.write_text(
        f"#!/usr/bin/python3 -IS\nimport sys\nsys.path[:0] = [{str(REPOSITORY)!r}]\n"
        "from prolog.cli import main\nraise SystemExit(main())\n"
    )
    stub.chmod(0o755)
    toml = tmp_path / "robust.toml"
    toml.write_text(f"[gate]\ndry_run = true\nspool = '{tmp_path}/spool'\n")
    env = {"SLURMD_NODENAME": "n1", "SLURM_JOB_ID": "7", "ROBUST_SITE_CONFIG": str(toml)}
    done = subprocess.run([stub], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert all(line.startswith("robust: ") for line in done.stderr.splitlines()), done.stderr
    assert "Traceback" not in done.stderr and "gate-crashed" not in done.stderr


def test_an_import_that_fails_closes(tmp_path: Path) -> None:
    """A package that is only half there: Python's own exit code closes the gate."""
    (tmp_path / "prolog").mkdir()
    (tmp_path / "prolog" / "__init__.py").touch()
    cli = (REPOSITORY / "prolog" / "cli.py").read_text()
    (tmp_path / "prolog" / "cli.py").write_text(cli)
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}]\n"
        "from prolog.cli import main\nraise SystemExit(main())\n"
    )
    done = subprocess.run(
        ["/usr/bin/python3", "-IS", "-c", code], env={}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "No module named 'health'" in done.stderr
    assert os.path.basename(done.args[0]) == "python3"  # noqa: PTH119


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
def test_a_person_without_a_job_is_told_so(
    site: GateSite, capfd: pytest.CaptureFixture[str], words: list[str]
) -> None:
    """Typed by hand it would record an admitted run of a job that is none."""
    site.find(finding())
    site.environ(job=0)
    assert main(words) == 2
    assert "slurmd has set no SLURM_JOB_ID: nothing was done" in capfd.readouterr().err
    assert site.events() == [] and site.slurm.drained == []
