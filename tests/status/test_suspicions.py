"""``robust-status NODE``, ``--lemons`` and ``--rules``: from files to a screen."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from status_records import NOW
from suspicion_records import ADA, BOB, StateDir
from test_status import UP, answering, shown

RED = "\x1b[31mred \u202e[bold]"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StateDir:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ROBUST_CONFIG", raising=False)
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.setattr("status.suspicions.time.time", lambda: NOW)
    return StateDir(tmp_path / "state")


def test_a_nodes_story(state: StateDir) -> None:
    state.job(7, uid=ADA)
    seen = {"job": 7, "uid": ADA if os.geteuid() == 0 else -1, "name": "n2.i1.json"}
    state.publish("n2", "accusation", 60, result="cleared", why=[RED], **seen)
    code, text = shown(["n2"], answering(UP), state.path)
    assert code == 0
    assert text.splitlines() == [
        "n2: DRAIN+IDLE",
        "drained: robust: bad [x]",
        "1 report: 1 cleared",
        "",
        "suspected by job 7, rule node-lost: cleared",
        "  2027-01-15 07:58:20  job 7 of ada reported n2: node lost (rule node-lost, incident i1)",
        "  2027-01-15 07:58:20  evidence: silent for 3 s",
        "  2027-01-15 07:58:20  evidence: ping failed",
        "  2027-01-15 07:58:20  job 7 evicted n2; n3 took its ranks",
        "  2027-01-15 07:58:23  outcome in job 7: recovered; 3 steps lost",
        "  2027-01-15 07:59:20  the gate cleared n2: no check found a fault (?[31mred ?[bold])",
    ]
    code, raw = shown(["n2", "--json"], answering(UP), state.path)
    data = json.loads(raw)
    assert (code, data["version"], data["node"], data["drained"]) == (0, 1, "n2", "robust: bad [x]")
    (one,) = data["suspicions"]
    assert (one["verdict"], one["of_job"], len(one["lines"])) == ("cleared", 7, 6)


def test_a_node_without_a_record_and_one_that_is_none(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = shown(["n3"], answering(UP), state.path)
    assert code == 0 and f"No job and no check has suspected n3 ({state.path})." in text
    code, text = shown(["n77"], answering(UP), state.path)
    said = capsys.readouterr().err
    assert (code, text) == (1, "")
    assert f"no record of node n77 under {state.path / 'jobs'}" in said
    assert "Slurm has no node of this name" in said


def test_without_slurm_the_records_speak(
    state: StateDir, capsys: pytest.CaptureFixture[str]
) -> None:
    state.job(7)
    code, text = shown(["n2"], answering({}), state.path)
    assert code == 1 and "Slurm did not answer" in text and "suspected by job 7" in text
    assert shown(["n9"], answering({}), state.path)[0] == 1
    assert "no slurmctld answers" in capsys.readouterr().err


def test_only_the_newest_suspicions_are_told_in_words(state: StateDir) -> None:
    for number in range(1, 31):
        state.job(number, uid=-1, time=NOW + number)
    _, text = shown(["n2"], answering({}), state.path)
    assert "30 reports: 30 open" in text and "The newest 20 follow" in text
    assert text.count("suspected by job") == 20
    _, raw = shown(["n2", "--json"], answering({}), state.path)
    assert len(json.loads(raw)["suspicions"]) == 30


@needs_root
def test_lemons(state: StateDir) -> None:
    for number, node, uid in ((1, "n2", ADA), (2, "n2", BOB), (3, "n1", ADA), (4, "n1", BOB)):
        state.job(number, node, uid)
    state.job(5, "n3", ADA)
    state.job(6, "made-up", BOB)
    state.withdraw(4, "n1")
    code, text = shown(["--lemons"], answering(UP), state.path)
    assert code == 0
    found = [line.split()[:8] for line in text.splitlines()[1:]]
    assert found == [
        ["n2", "yes", "2", "2", "2", "0", "0", "0"],
        ["n3", "1", "1", "1", "0", "0", "0", "01-15"],
        ["n1", "1", "1", "1", "0", "0", "1", "01-15"],
    ]
    assert "robust: bad [x]" in text.splitlines()[1]
    assert shown(["--lemons", "--format", "exclude"], answering(UP), state.path) == (0, "n2\n")
    code, raw = shown(["--lemons", "--json"], answering(UP), state.path)
    rows = json.loads(raw)["nodes"]
    assert [(row["name"], row["exclude"]) for row in rows] == [
        ("n2", True),
        ("n3", False),
        ("n1", False),
    ]


@needs_root
def test_the_exclude_list_is_folded_and_names_nodes_of_slurm_only(state: StateDir) -> None:
    for number, node in enumerate(("n1", "n2", "n3", "n4", "n2,n3", "-x")):
        state.job(10 + number, node, ADA)
        state.job(20 + number, node, BOB)
    assert shown(["--lemons", "--format", "exclude"], answering(UP), state.path)[1] == "n[1-3]\n"
    code, text = shown(["--lemons", "--format", "exclude"], answering({}), state.path)
    assert (code, text) == (1, ""), "without Slurm nobody knows which names are nodes"


def test_without_lemons_the_list_is_empty(state: StateDir) -> None:
    assert shown(["--lemons", "--format", "exclude"], answering(UP), state.path) == (0, "")
    assert "No job has reported a node." in shown(["--lemons"], answering(UP), state.path)[1]


def test_rules(state: StateDir) -> None:
    assert "No rule has reported" in shown(["--rules"], answering(UP), state.path)[1]
    state.job(7)
    state.job(8)
    state.withdraw(8)
    told = {"job": 9, "uid": 5, "name": "n3.i1.json", "rule": "hang", "result": "confirmed"}
    state.publish("n3", "accusation", 5, **told)  # the job has removed its records
    code, text = shown(["--rules"], answering(UP), state.path)
    assert code == 0
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["node-lost", "2", "2", "0", "0", "1", "0", "1", "1", "(100", "%)"],
        ["hang", "1", "0", "1", "0", "0", "0", "0", "0", "(0", "%)"],
    ]
    _, raw = shown(["--rules", "--json"], answering(UP), state.path)
    assert json.loads(raw)["rules"][0]["false_share"] == 1.0


@pytest.mark.parametrize("kind", ["link", "pipe", "huge"])
def test_traps_beside_the_gates_files_are_told_not_raised(
    state: StateDir, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state.path / "nodes" / "n2.jsonl"
    if kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with path.open("wb") as file:
            file.truncate(1 << 30)
    state.job(7)
    code, text = shown(["n2"], answering(UP), state.path)
    assert code == 0 and "1 report: 1 open" in text
    assert kind == "huge" or "cannot read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["n2", "--lemons"],
        ["--lemons", "--rules"],
        ["7", "--rules"],
        ["--format", "exclude"],
        ["--lemons", "--format", "exclude", "--json"],
        ["--lemons", "--format", "csv"],
        ["../n2"],
        ["n[1-2]"],
        [".n2"],
        [""],
    ],
)
def test_arguments_that_do_not_go_together(
    state: StateDir, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = shown(argv, answering(UP), state.path)
    err = capsys.readouterr().err
    said = json.loads(text)["error"]["message"] if "--json" in argv else err
    assert code == 2 and said and bool(text) is ("--json" in argv)
