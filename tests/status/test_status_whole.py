"""A report of a real robust-srun's job: a rank fails once, and everything is told of it.

Shims and ranks are real; ``srun`` is a stand-in, and Slurm does not answer.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from srun_here import JOB, Step

from robust_slurm.state_dir.progress import read_progress

pytestmark = pytest.mark.slow
RANK = """
import os, sys, time
from robust_slurm.heartbeat import beat
last = os.path.exists("failed")
for step in range(1, 60):
    beat(step, loss=5.0 / step)
    if step == 30 and not last and os.environ["RANK"] == "1":
        open("failed", "w").close()
        sys.exit("ValueError: shard 7: 4093 tokens, expected 4096")
    time.sleep(0.05)
"""
TELL = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read())"


def test_a_failure_is_told_from_end_to_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    (tmp_path / "tell.py").write_text(TELL)
    step = Step(tmp_path, 2)
    told = tmp_path / "told"
    step.start(
        tmp_path,
        "python",
        "train.py",
        ROBUST_ON_INCIDENT=f"python {tmp_path / 'tell.py'} {told}",
        SLURM_JOB_NAME="lm",
        SLURM_GPUS_ON_NODE="8",
    )
    step.until(step.ended, "its end", 120.0)
    assert step.close() == 0, step.said()
    job = step.state / "jobs" / str(JOB)
    (record,) = map(json.loads, (job / "incidents.jsonl").read_text().splitlines())
    assert json.loads(told.read_text())["incident"]["id"] == record["id"]

    (run,), problems = read_progress(job)
    assert problems == [] and (run.state, run.gpus, run.ranks) == ("completed", 8, 2)
    assert run.first_step is not None and run.ended is not None
    assert run.started < run.first_step < record["time"] < run.ended
    assert {p.epoch for p in run.points} == {1, 2} and all(p.loss for p in run.points)
    assert [placing.epoch for placing in run.placings] == [1, 2]

    def status(*words: str) -> str:
        done = step.run("status.cli", str(JOB), *words)
        assert done.returncode == 1 and not done.stderr, done.stderr  # 1: Slurm did not answer
        return done.stdout

    why = " ".join(status("--why").split())
    assert f"Restart 1 of job {JOB}" in why and "shard 7: 4093 tokens, expected 4096" in why
    accounts = json.loads(status("--accounts", "--json"))
    (of,) = accounts["jobs"]
    spent = {row["name"]: row["seconds"] for row in of["by_phase"]}
    for phase, seconds in record["phases"].items():
        if phase != "total":
            assert spent.get(phase, 0.0) == pytest.approx(seconds, abs=0.002), phase
    assert of["elapsed_s"] == pytest.approx(run.ended - run.started, abs=0.002)
    assert spent["start_up"] == pytest.approx(run.first_step - run.started, abs=0.002)
    page = tmp_path / "r.html"
    assert status("--html", str(page)).strip().endswith(str(page))
    text = page.read_text()
    assert "Step time" in text and "shard 7" in text and "incarnations of the ranks" in text
