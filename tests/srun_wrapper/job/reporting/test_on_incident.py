"""The commands at the end of an incident: JSON on stdin, a deadline, and nothing waits for them."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from made_job import Job
from waiting import until

from robust_slurm.config import load
from robust_slurm.state_dir.ledger import JobLedger
from robust_slurm.state_dir.progress import read_progress
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.job.reporting import job_log, on_incident
from srun_wrapper.job.reporting.job_records import JobRecords
from srun_wrapper.job.reporting.on_incident import IncidentCommands, run
from srun_wrapper.job.reporting.phase import Phase


def program(path: Path, text: str) -> str:
    path.write_text(f"import sys, time\n{text}\n")
    return f"{sys.executable} {path}"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sys.stdin.read()", ""),
        ("", ""),  # it does not read
        ("time.sleep(0.5); assert len(sys.stdin.read()) == 300_000", ""),  # more than a pipe has
        ("sys.exit('no route to host')", "exit code 1: no route to host"),
        ("sys.stdin.read(); time.sleep(60)", "not done in 0.5 s, killed"),
    ],
)
def test_what_becomes_of_a_command(tmp_path: Path, text: str, why: str) -> None:
    began = time.monotonic()
    deadline = 0.5 if "sleep(60" in text else 30.0
    assert run(program(tmp_path / "x.py", text), "{}\n" * 100_000, deadline) == why
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("command", ["/no/such", "'unclosed", "\0"])
def test_a_command_that_cannot_be_started(command: str) -> None:
    assert run(command, "", 1.0).startswith("cannot be started: ")


def test_nobody_waits_and_no_more_than_a_few_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_incident, "MAX_WAITING", 2)
    said = tmp_path / "said"
    body = f"open({str(said)!r}, 'a').write(sys.stdin.read()); time.sleep(1)"
    commands = IncidentCommands([program(tmp_path / "x.py", body), "", "/no/such"])
    began = time.monotonic()
    for number in range(50):
        commands.put({"number": number})
    assert time.monotonic() - began < 1.0
    until(said.exists, "the first one")
    commands.close(patience=0.1)
    assert time.monotonic() - began < 30
    idle = IncidentCommands([""])
    idle.put({})
    idle.close()


def test_no_command_outlives_the_end_and_none_begins_after_it(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    body = f"import os; open({str(pid)!r}, 'a').write(f'{{os.getpid()}}\\n'); time.sleep(60)"
    commands = IncidentCommands([program(tmp_path / "x.py", body)])
    for number in range(3):
        commands.put({"number": number})
    until(lambda: pid.exists() and pid.read_text().endswith("\n"), "the first one")
    commands.close(patience=0.1)
    (only,) = pid.read_text().split()
    assert not Path(f"/proc/{only}").exists()


def test_the_end_of_the_job_does_not_end_a_command(tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all processes of a job that is requeued."""
    said = tmp_path / "said"
    body = f"import os; os.kill(os.getpid(), 15); open({str(said)!r}, 'w').write(sys.stdin.read())"
    commands = IncidentCommands([f"/bin/sh -c '{program(tmp_path / 'x.py', body)}'"])
    commands.put({"outcome": "requeued"})
    commands.close(30.0)
    assert json.loads(said.read_text()) == {"outcome": "requeued"}


def test_no_thread_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the user's limit of processes a recovery goes on without its notification."""

    def no_more(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    commands = IncidentCommands(["/bin/true"])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_more)
        commands.put({})
    commands.put({})
    commands.close()


def test_the_log_has_no_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """All users can read it, and a webhook's address is a secret."""
    command = f"{program(tmp_path / 'x.py', 'sys.exit(3)')} https://hooks.example/SECRET"
    caplog.set_level("INFO", "robust-srun")
    commands = IncidentCommands([command])
    commands.put({})
    commands.close(30.0)
    config = load(env={}, cwd=tmp_path)
    job_log.begin(tmp_path, replace(config, on_incident=command, site_on_incident=command))
    assert job_log.end() == ""
    log = caplog.text + (tmp_path / "robust-srun.log").read_text()
    assert "exit code 3" in log and f"site_on_incident = {sys.executable} …" in log
    assert "SECRET" not in log


def test_records_of_a_job_and_both_commands(tmp_path: Path) -> None:
    """The user's command and the site's get the incident; progress.jsonl gets the run."""
    job = Job(active=2, spares=0)
    for name in ("on_incident", "site_on_incident"):
        body = f"open({str(tmp_path / name)!r}, 'w').write(sys.stdin.read())"
        command = program(tmp_path / f"{name}.py", body)
        object.__setattr__(job.state.config, name, command)
    ledger = JobLedger(tmp_path)
    env = {"SLURM_JOB_NAME": "lm", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_PARTITION": "train"}
    phase = Phase()
    records = JobRecords(job.state, ledger, phase, env)
    records.chronicle.world()
    now = time.monotonic()
    job.state.progress.beats, job.state.progress.best = 3, 3
    records.look(now)
    records.look(now + 0.1)  # too soon for another point
    records.look(now + 10)
    failure = Failure("crash", now, now - 1, "n1", 0)
    diagnosis = Diagnosis("crash", "node", ("n1",), ("rank 0 on n1: exit code 1",), "s", failure)
    incident = Incident("0-1", 1, diagnosis, now - 1, now)
    incident.outcome = "recovered"
    records.incident(incident)
    phase.name = "completed"
    records.close()
    for name in ("on_incident", "site_on_incident"):
        told = json.loads((tmp_path / name).read_text())
        assert (told["version"], told["event"], told["job_name"]) == (1, "incident", "lm")
        assert told["incident"]["suspects"] == ["n1"] and told["records"] == str(tmp_path)
        assert told["text"].startswith("recovered from crash on n1")
    (run_,), problems = read_progress(tmp_path)
    assert problems == []
    assert (run_.partition, run_.gpus, run_.ranks, run_.state) == ("train", 8, 4, "completed")
    assert run_.first_step is not None and run_.ended is not None
    assert [point.step for point in run_.points] == [3, 3]
    assert len(run_.placings) == 1 and len(run_.placings[0].places) == 2


def test_only_a_recovery_is_told_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(IncidentCommands, "put", lambda _self, record: told.append(record["text"]))
    job = Job(active=2, spares=0)
    records = JobRecords(job.state, JobLedger(tmp_path), Phase(), {})
    failure = Failure("node_lost", 2.0, 1.0, "n1")
    diagnosis = Diagnosis("node_lost", "node", ("n1",), ("no report",), "s", failure)
    for outcome in ("requeued", "stopped: nothing is left", "recovered"):
        incident = Incident("0-1", 1, diagnosis, 1.0, 2.0)
        incident.outcome = outcome
        records.incident(incident)
    records.close()
    assert told[:2] == ["node lost on n1: requeued", "node lost on n1: stopped: nothing is left"]
    assert told[2].startswith("recovered from node lost on n1 in ")


def test_the_settings_are_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text('site_on_incident = "/usr/local/bin/page-us"\non_incident = "theirs"\n')
    found = load(env={"ROBUST_ON_INCIDENT": "mine --now"}, cwd=tmp_path, site_file=site)
    assert (found.on_incident, found.site_on_incident) == ("mine --now", "/usr/local/bin/page-us")
