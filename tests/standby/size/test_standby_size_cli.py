"""robust-standby size on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from job_records import Job, one_job
from places import REPOSITORY

from standby.size.count import LossSource, losses, pool


def robust_standby(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "standby.cli", *words],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def answer(*words: str) -> dict[str, Any]:
    done = robust_standby("size", *words, "--json")
    assert done.returncode == 0, done.stderr
    data: dict[str, Any] = json.loads(done.stdout)
    assert data["version"] == 1
    return data


def test_it_says_how_many() -> None:
    done = robust_standby("size", "--nodes", "1024", "--rate", "1.2")
    assert done.returncode == 0 and not done.stderr
    assert "1024 nodes: keep 4 standbys (enough with probability 0.99)" in done.stdout
    assert "not counted; add them with --group-rate and --switch-rate" in done.stdout


def test_causes_add_up() -> None:
    words = ("--nodes=1200", "--rate=1.32", "--group-rate=0.1389", "--switch-rate=0.01")
    found = answer(*words)
    assert [cause["size"] for cause in found["causes"]] == [1, 8, 32]
    assert [cause["units"] for cause in found["causes"]] == [1200, 150, 38]
    assert [cause["standbys"] for cause in found["causes"]] == [5, 16, 32]
    lost = losses(1200, [LossSource(1, 1.32e-3), LossSource(8, 1.389e-4), LossSource(32, 1e-5)])
    assert found["standbys"] == pool(lost)


def test_sizes_refill_and_quantile_are_used() -> None:
    words = ("--nodes=512", "--rate=6.5", "--group=4", "--group-rate=0.2", "--switch=16")
    data = answer(*words, "--switch-rate=0.1", "--refill=6", "--quantile=0.999")
    lost = losses(512, [LossSource(1, 6.5e-3), LossSource(4, 2e-4), LossSource(16, 1e-4)], 0.25)
    assert data["standbys"] == pool(lost, 0.999)
    assert (data["refill_hours"], data["quantile"], data["measured"]) == (6.0, 0.999, None)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--rate=0.0012",), "a node fails once in 2,283 years"),
        (("--rate=400",), "is lost with p = 0.4 within the refill time, but counted once"),
    ],
)
def test_doubts_are_said(words: tuple[str, ...], said: str) -> None:
    done = robust_standby("size", "--nodes=100", *words)
    assert done.returncode == 0 and said in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no command"),
        ("resize", "no such command: resize"),
        ("size", "--nodes N"),
        ("size --nodes 10", "either --rate R or --from-ledger"),
        ("size --nodes 10 --rate 1 --from-ledger", "either --rate R or --from-ledger"),
        ("size --nodes 0 --rate 1", "not a number of nodes"),
        ("size --nodes 100001 --rate 1", "not a number of nodes"),
        ("size --nodes 1e3 --rate 1", "not a number of nodes"),
        ("size --nodes -5 --rate 1", "--nodes"),
        ("size --nodes 10 --rate -1", "--rate"),
        ("size --nodes 10 --rate nan", "not a number: 'nan'"),
        ("size --nodes 10 --rate inf", "not a number: 'inf'"),
        ("size --nodes 10 --rate one", "not a number: 'one'"),
        ("size --nodes 10 --rate 2000", "are the units right?"),
        ("size --nodes 10 --rate 1 --quantile 99", "like 0.99"),
        ("size --nodes 10 --rate 1 --quantile 1", "like 0.99"),
        ("size --nodes 10 --rate 1 --refill 0", "above 0"),
        ("size --nodes 10 --rate 1 --group 8", "--group needs --group-rate"),
        ("size --nodes 10 --rate 1 --switch 8", "--switch needs --switch-rate"),
        ("size --nodes 10 --rate 1 --group 0 --group-rate 1", "not a number of nodes"),
        ("size --nodes 10 --rate 1 --node-days 5 --since 3", "--node-days, --since: only with"),
        ("size --nodes 10 --from-ledger --group-rate 900", "are the units right?"),
        ("size --nodes 10 --from-ledger --state-dir /no/such", "/no/such is not a directory"),
        (
            "size --nodes 10 --rate 1 --quant 0.9",
            "--quant; did you mean --quantile?",
        ),
        ("size --nodes 10 --rate 1 7", "unexpected: 7"),
        ("size --table", "--table"),
    ],
)
def test_wrong_usage(words: str, said: str) -> None:
    done = robust_standby(*words.split())
    assert done.returncode == 2
    assert said in done.stderr and not done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--help",), ("-h",), ("size", "--help")])
def test_help(words: tuple[str, ...]) -> None:
    done = robust_standby(*words)
    assert done.returncode == 0 and "usage: robust-standby" in done.stdout


@pytest.mark.parametrize("words", ["--nodes 100 --rate 1", "--nodes 100 --rate 1 --json"])
def test_a_reader_that_has_enough_is_no_error(words: str) -> None:
    """``robust-standby size … | head``: nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "standby.cli", "size", *words.split()]
    with os.fdopen(writer, "w") as out:
        done = subprocess.run(
            command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (0, "")


# -- measured


def size(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return robust_standby("size", "--from-ledger", *words, **env)


def test_measured_on_the_command_line(tmp_path: Path) -> None:
    one_job(tmp_path, time.time())
    words = ("--nodes=64", f"--state-dir={tmp_path}")
    done = size(*words)
    assert done.returncode == 0, done.stderr
    assert "watched: 40.0 node-days (5 nodes in 1 job, " in done.stdout
    assert "note: 1 event in 40 node-days: the rate may be several times" in done.stdout
    assert "64 nodes: keep 5 standbys" in done.stdout
    data = json.loads(size(*words, "--json").stdout)
    assert data["measured"]["node_days"] == pytest.approx(40.0, abs=0.01)
    assert data["measured"]["sizes"] == {"1": 1}
    assert data["standbys"] == 5
    data = json.loads(size(*words, "--json", "--node-days=400", "--since=5").stdout)
    assert data["causes"][0]["per_1000"] == pytest.approx(1000 / 400)


def test_nothing_was_watched(tmp_path: Path) -> None:
    job = Job(tmp_path, 7, time.time())
    (job.dir / "events.jsonl").write_text("torn")
    done = size("--nodes=64", f"--state-dir={tmp_path}")
    assert done.returncode == 1 and not done.stdout
    assert "--node-days D, or a rate" in done.stderr
    assert "events.jsonl: 1 unreadable lines skipped" in done.stderr
    done = size("--nodes=64", f"--state-dir={tmp_path}", "--node-days=1000")
    assert done.returncode == 0 and "may be up to 3 per 1,000 node-days; see --rate" in done.stdout


def test_the_setting_names_the_state_directory(tmp_path: Path) -> None:
    one_job(tmp_path, time.time())
    done = size("--nodes=64", ROBUST_STATE_DIR=str(tmp_path))
    assert done.returncode == 0 and "40.0 node-days" in done.stdout
