"""robust-status: from files and Slurm's answers to rows, and from rows to a screen."""

from __future__ import annotations

import errno
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from status_records import NOW, accusation, incident, roster, view

from robust_slurm.command_line.screen import console
from robust_slurm.slurm import Completed, Slurm
from robust_slurm.state_dir.files import read_state
from robust_slurm.state_dir.records import Checkpoint, node_report_from, roster_from
from status import render
from status.cli import main
from status.model import NodeRow, SlurmView, StatusReport, report, status_of


@pytest.mark.parametrize(
    ("state", "age", "slurm", "status"),
    [
        ("running", 1, view(j7="RUNNING"), "running"),
        ("recovering", 1, view(j7="RUNNING"), "recovering"),
        ("running", 1, view(), "running"),  # Slurm may lag behind; the supervisor just spoke
        ("running", 31, view(), "ended"),
        ("running", 31, view(j7="COMPLETED"), "completed"),
        ("running", 31, view(j7="CANCELLED"), "cancelled"),
        ("running", 31, view(j7="BOOT_FAIL"), "ended"),
        ("running", 31, view(j7="RUNNING"), "silent"),
        ("running", 31, SlurmView(error="down"), "silent"),
        ("running", 1, SlurmView(error="down"), "running"),
        ("completed", 31, view(j7="RUNNING"), "completed"),  # its script goes on
        ("cancelled", 1, view(j7="CANCELLED"), "cancelled"),
        ("cancelled", 31, view(), "cancelled"),
        ("cancelled", 1, view(j7="COMPLETING"), "cancelled"),
        ("cancelled", 31, SlurmView(error="down"), "cancelled"),
        ("cancelled", 1, view(j7="RUNNING"), "cancelled"),  # the step alone
        ("cancelled", 31, view(j7="PENDING"), "requeued"),  # scontrol requeue
        ("cancelled", 31, view(j7="PREEMPTED"), "preempted"),
        ("cancelled", 31, view(j7="TIMEOUT"), "timed out"),
        ("failed", 1, view(), "failed"),
        ("requeued", 31, view(j7="PENDING"), "requeued"),
        ("requeued", 31, view(j7="CANCELLED"), "cancelled"),
    ],
)
def test_status_of_a_step(state: str, age: float, slurm: SlurmView, status: str) -> None:
    told = roster_from(roster(state=state, updated=NOW - age))
    assert told is not None
    assert status_of(told, slurm, NOW) == status


def test_report_of_a_cluster() -> None:
    told = [roster_from(roster()), roster_from(roster(job_id=5, updated=NOW - 900))]
    against = [
        node_report_from(accusation()),
        node_report_from(accusation(time=NOW - 50, job=9, evidence=["again"])),
        node_report_from(accusation(node="made-up")),
    ]
    done = report(
        [r for r in told if r], [a for a in against if a], [], view(j7="RUNNING"), "standby", NOW
    )
    rows = {row.name: row for row in done.nodes}
    assert set(rows) == {"n1", "n2", "n3", "n4"}
    assert rows["n2"].state == ("DOWN", "DRAIN", "NOT_RESPONDING")
    assert rows["n2"].reason == "robust: node_lost"
    assert rows["n2"].accusations == 2
    assert rows["n2"].newest_evidence == "job 9: again"
    assert [rows[n].pool for n in rows] == ["train", "train", "standby", "standby"]
    (job,) = done.jobs
    assert (job.job_id, job.status, job.slurm_state, job.ettr) == (7, "running", "RUNNING", 0.989)
    assert done.problems == ()


def test_a_withdrawn_report_is_shown_as_such(tmp_path: Path) -> None:
    directory = tmp_path / "jobs" / "7" / "accusations"
    directory.mkdir(parents=True)
    files: dict[str, dict[str, Any]] = {"n2.i1": {}}
    files["n2.i2"] = {"incident": "i2", "time": NOW, "evidence": ["ECC"]}
    files["n2.i1.withdrawn"] = {"withdrawn": "the same error on n2, s1"}
    files["n3.i1"] = {"node": "n3"}
    files["n3.i1.withdrawn"] = {"node": "n3", "withdrawn": "the same error on n3, s1"}
    for name, changes in files.items():
        (directory / f"{name}.json").write_text(json.dumps(accusation(**changes)))
    found = read_state(tmp_path)
    assert found.problems == []
    done = report([], found.reports, [], view(), "standby", NOW)
    rows = {row.name: (row.accusations, row.withdrawn, row.newest_evidence) for row in done.nodes}
    assert rows["n2"] == (1, 1, "job 7: ECC")
    assert rows["n3"] == (0, 1, "job 7: withdrawn: the same error on n3, s1")


def test_without_slurm_the_files_still_speak() -> None:
    told, against = roster_from(roster()), node_report_from(accusation(node="n9"))
    assert told is not None
    assert against is not None
    done = report([told], [against], [], SlurmView(error="down"), "standby", NOW)
    assert [row.name for row in done.nodes] == ["n1", "n2", "n3", "n9"]
    assert {row.pool for row in done.nodes} == {""}
    assert done.slurm_error == "down"


def test_a_missing_standby_partition_is_told() -> None:
    done = report([], [], [], view(), "spare", NOW)
    assert "no partition 'spare'" in done.problems[0]


NODE_TEXT = (
    "NodeName=n1 State=MIXED Partitions=train\n"
    "NodeName=n2 State=IDLE+DRAIN Partitions=train  Reason=robust: bad [x] [root@1795251695]\n"
    "NodeName=n3 State=IDLE Partitions=standby\n"
)
UP = {
    "ping": "Slurmctld(primary) at head is UP\n",
    "node": NODE_TEXT,
    "partition": "PartitionName=train State=UP Nodes=n1\nPartitionName=standby State=UP\n",
    "-h": "7|RUNNING\n",
}


def answering(answers: Mapping[str, str]) -> Slurm:
    def run(
        argv: Sequence[str],
        deadline_s: float,
        input: str | None,
        env: Mapping[str, str],
        cwd: Path | None,
    ) -> Completed:
        for word, text in answers.items():
            if word in argv:
                return Completed(0, text, "")
        return Completed(1, "Slurmctld(primary) at head is DOWN\n", "Unable to contact slurm")

    return Slurm(run, environ={})


@pytest.fixture
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROBUST_CONFIG", raising=False)
    monkeypatch.setattr("status.source.time.time", lambda: NOW)
    monkeypatch.setenv("TZ", "UTC")
    job = tmp_path / "state" / "jobs" / "7"
    (job / "accusations").mkdir(parents=True)
    evil = "\x1b[31mred\x1b[0m [bold]x[/bold] \x9b2J\u202e"
    (job / "roster.0.json").write_text(json.dumps(roster(job_name=evil)))
    (job / "incidents.jsonl").write_text(json.dumps(incident(outcome=evil)) + "\n{torn")
    (job / "accusations" / "n2.i1.json").write_text(json.dumps(accusation(evidence=[evil])))
    return tmp_path / "state"


def shown(argv: list[str], slurm: Slurm, state_dir: Path) -> tuple[int, str]:
    out = io.StringIO()
    code = main([*argv, f"--state-dir={state_dir}"], slurm, out)
    return code, out.getvalue()


def test_table(state_dir: Path) -> None:
    code, text = shown(["--nodes"], answering(UP), state_dir)
    assert code == 0
    assert re.search(
        r"^n2 +train +DRAIN\+IDLE +robust: bad \[x\] +1 +job 7: \?\[31mred", text, re.M
    )
    assert re.search(r"^n3 +standby +IDLE", text, re.M)
    assert re.search(r"^7\.0 .*\[bold\]x.* ada +running +n\[1,3\] \(1 released\) +120 +0\.25 s +2 "
                     r"+1 +3 +0\.9890$", text, re.M)  # fmt: skip
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)


def test_job_table(state_dir: Path) -> None:
    code, text = shown(["7"], answering(UP), state_dir)
    assert code == 0
    assert "node_lost" in text
    assert "swap_standby" in text
    assert "5.50" in text
    assert "torn last line skipped" in text
    assert "\x1b" not in text


def test_json(state_dir: Path) -> None:
    code, text = shown(["--json"], answering(UP), state_dir)
    data = json.loads(text)
    assert code == 0
    assert data["version"] == 1
    assert data["nodes"][1]["state"] == ["DRAIN", "IDLE"]
    assert data["jobs"][0]["nodes"][1]["job_id"] == 8
    code, text = shown(["7", "--json"], answering(UP), state_dir)
    assert json.loads(text)["incidents"][0]["phases"]["total"] == 5.5


def test_who_waits_for_whom_is_shown_of_a_hang_and_bounded(state_dir: Path) -> None:
    told = [f"rank {number} on n[1-2]: in f" for number in range(12)]
    lines = [incident(symptom="hang", evidence=told), incident(evidence=["not a hang"])]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (state_dir / "jobs" / "7" / "incidents.jsonl").write_text(text)
    _, said = shown(["7"], answering(UP), state_dir)
    assert [line in said for line in told] == [True] * 10 + [False] * 2
    assert "not a hang" not in said


def test_the_rule_of_an_incident_is_shown_and_old_records_have_none(state_dir: Path) -> None:
    lines = [incident(), incident(rule="machine-error", rung="spare"), incident(rule=["x"])]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (state_dir / "jobs" / "7" / "incidents.jsonl").write_text(text)
    _, said = shown(["7"], answering(UP), state_dir)
    assert "RULE" in said and said.count("machine-error") == 1
    _, raw = shown(["7", "--json"], answering(UP), state_dir)
    found = [(each["rule"], each["rung"]) for each in json.loads(raw)["incidents"]]
    assert found == [("", ""), ("machine-error", "spare"), ("", "")]


def test_a_withdrawn_report_changes_the_cause_that_is_shown(state_dir: Path) -> None:
    job = state_dir / "jobs" / "7"
    (job / "incidents.jsonl").write_text(json.dumps(incident(id="0-9", rule="node-lost")) + "\n")
    back = {"node": "n2", "incident": "0-9", "time": incident()["time"] + 3, "job": 7}
    text = json.dumps({**back, "withdrawn": "a network outage", "cause": "transient"})
    (job / "accusations" / "n2.0-9.withdrawn.json").write_text(text)
    _, said = shown(["7"], answering(UP), state_dir)
    (row,) = (line for line in said.splitlines() if "node-lost" in line)
    assert "transient" in row and "n2" not in row
    assert "the report against n2 is withdrawn: a network outage" in said


@pytest.mark.parametrize("name", ["scandir", "stat"])
def test_a_closed_state_dir_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of the jobs, or one above: as a user meets it, for root is refused nothing."""
    (tmp_path / "jobs").mkdir()
    closed = ("scandir",) if name == "scandir" else ("scandir", "stat")
    for call in closed:
        real = getattr(os, call)

        def refused(path: Any, *more: Any, real: Any = real, **named: Any) -> Any:
            if str(path).startswith(str(tmp_path)):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return real(path, *more, **named)

        monkeypatch.setattr(os, call, refused)
    for words in ([], ["--accounts"], ["--nodes"]):
        code, text = shown(words, answering(UP), tmp_path)
        assert code == 1 and "Permission denied" in text and "no records" not in text
        assert "Nothing needs" not in text


def test_a_wrong_state_dir_is_said_and_is_no_calm(tmp_path: Path, state_dir: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name, why, code in (("gone", "No such file", 1), ("empty", "does not exist", 0)):
        for words in ([], ["--accounts"], ["--nodes"], ["--bad"]):
            said, text = shown(words, answering(UP), tmp_path / name)
            assert said == code
            assert "no records: " in text and why in text
            assert "Nothing needs attention" not in text
            assert "No robust jobs" not in text
        assert shown(["--json"], answering(UP), tmp_path / name)[0] == code
    (tmp_path / "empty" / "jobs").mkdir()
    code, text = shown([], answering(UP), tmp_path / "empty")
    assert code == 0 and "No robust jobs are running." in text


def test_slurm_down(state_dir: Path) -> None:
    code, text = shown([], answering({}), state_dir)
    assert code == 1
    assert "Slurm did not answer" in text
    assert "running" in text
    assert shown(["7"], answering({}), state_dir)[0] == 1


def test_unknown_job_and_bad_arguments(
    state_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shown(["4000"], answering(UP), state_dir)[0] == 1
    assert "no record of job 4000" in capsys.readouterr().err
    for bad in (["n[1-2]"], ["-3"], ["0"], ["1", "2"], ["--nope"], ["9" * 5000]):
        assert shown(bad, answering(UP), state_dir)[0] == 2
    monkeypatch.setenv("ROBUST_SPARES", "many")
    assert shown([], answering(UP), state_dir)[0] == 2


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"ranks": 4, "world_size": 2}, "4 of 4 ranks would start warm and 2 on spare nodes"),
        ({"ranks": 8}, "4 of 8 ranks would start warm and 2 on spare nodes"),
        ({"world_size": 2}, "4 of 4 ranks would start warm and 2 on spare nodes"),  # an old roster
    ],
)
def test_ranks_that_would_start_warm(state_dir: Path, changes: dict[str, Any], text: str) -> None:
    """A torchrun in a task slot starts more ranks than the step has tasks."""
    nodes = [
        {"name": "n1", "job_id": 7, "role": "active", "ranks": [0], "warm": 2},
        {"name": "n2", "job_id": 7, "role": "active", "ranks": [1], "warm": 2},
        {"name": "n3", "job_id": 7, "role": "spare", "ranks": [], "warm": 2},
    ]
    told = roster(**({"nodes": nodes} if changes else {}), **changes)
    (state_dir / "jobs" / "7" / "roster.0.json").write_text(json.dumps(told))
    _, said = shown(["7"], answering(UP), state_dir)
    assert text in said and ("would start warm" in said) is bool(text)


def test_what_is_not_known_is_no_zero(state_dir: Path) -> None:
    told = roster(lost_steps=None, unproductive_s=None, ettr=None)
    (state_dir / "jobs" / "7" / "roster.0.json").write_text(json.dumps(told))
    lines = [incident(lost_steps=None), incident(lost_steps=None, outcome="requeued")]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (state_dir / "jobs" / "7" / "incidents.jsonl").write_text(text)
    _, said = shown(["7"], answering(UP), state_dir)
    assert said.count("?") == 3  # lost steps and ETTR of the job, lost steps of what went on
    code, raw = shown(["7", "--json"], answering(UP), state_dir)
    (step,) = json.loads(raw)["steps"]
    assert code == 0 and step["lost_steps"] is step["ettr"] is step["unproductive_s"] is None


def test_a_job_that_does_not_save_every_step_says_so() -> None:
    why = "every 3rd step (rank 2: a snapshot and its replica take 14 s, …)"
    at = Checkpoint(120, 117, 100, None, "any 1 node", "/ckpt", 5_000_000, why, 0.0123)
    assert render._checkpoint(at) == (
        "training step 120 in memory, step 117 on other nodes, step 100 on disk in /ckpt; "
        f"any 1 node; in memory {why}; 5.0 MB a rank, blocked 12.3 ms a snapshot"
    )


def test_nodes_of_a_large_cluster_that_are_alike_share_a_row() -> None:
    def said(count: int) -> list[str]:
        fine = NodeRow("", ("IDLE",), "", "train", 0, "", None)
        nodes = [replace(fine, name=f"n{number}") for number in range(1, count + 1)]
        nodes[7] = replace(nodes[7], accusations=1, newest_evidence="job 7: crash")
        for at in (20, 21, 40):
            nodes[at] = replace(nodes[at], state=("DRAIN", "IDLE"), reason="robust: x")
        out = io.StringIO()
        render.print_report(StatusReport(NOW, "", tuple(nodes), (), ()), console(out))
        return [" ".join(line.split()) for line in out.getvalue().splitlines()]

    assert len(said(64)) > 64 and "n41 train DRAIN+IDLE robust: x" in said(64)
    assert said(1200)[1:4] == [
        "n[1-7,9-20,23-40,42-1200] (1196 nodes) train IDLE",
        "n8 train IDLE 1 job 7: crash",
        "n[21-22,41] (3 nodes) train DRAIN+IDLE robust: x",
    ]
