"""Estimates of what a restart cost, by the files that a program has saved."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import RECOVERED, Incident
from srun_wrapper.decide.saved_files import LARGE, SavedFile, newest, saves_state
from srun_wrapper.job.progress import MOST_COUNTS, Progress
from srun_wrapper.job.reporting.report import UNSEEN, Account
from srun_wrapper.recover.lost_work import directories, estimate, search


@pytest.mark.parametrize(
    ("path", "size", "is_one"),
    [
        ("/run/ckpt.pt", 900, True),
        ("/run/out/checkpoint.json", 20, True),
        ("/run/step_40/model-00001.bin", LARGE, True),
        ("/run/checkpoint-40/trainer_state.json", 300, True),
        ("/run/__0_0.distcp", 5000, True),
        ("/run/weights", LARGE, True),
        ("/run/weights", LARGE - 1, False),
        ("/run/ckpt.pt", 0, False),  # it has only been opened
        ("/run/ckpt.pt.tmp", LARGE, False),  # never complete
        ("/run/ckpt/.nfs0001", LARGE, False),
        ("/run/ckpt/train.log", LARGE, False),
        ("/run/slurm-12.out", LARGE, False),
        ("/run/core.4711", LARGE, False),  # of the fault itself
        ("/run/events.out.tfevents.17", LARGE, False),
        ("/run/metrics.jsonl", LARGE, False),
        ("/run/cache-00.arrow", LARGE, False),
    ],
)
def test_files_that_save_state(path: str, size: int, is_one: bool) -> None:
    assert saves_state(path, size) is is_one


def test_the_newest_between_two_times() -> None:
    files = [SavedFile("a", 10.0), SavedFile("b", 20.0), SavedFile("c", 31.0)]
    assert newest(files, 5.0, 30.0) == files[1]
    assert newest(files, 21.0, 30.0) is None


def test_where_is_looked() -> None:
    command = ("python", "train.py", "--out_dir=run/7", "--data", "/data/text", "--lr=1e-3")
    found = directories(command, "/home/u/lm", ["/scratch/u/step_40/model.pt"])
    assert found == [
        "/scratch/u/step_40",
        "/scratch/u",
        "/home/u/lm/run/7",
        "/home/u/lm/run",
        "/data/text",
        "/data",
        "/home/u/lm",
    ]
    assert directories(("python", "/tmp/train.py"), "/", []) == ["/tmp/train.py"]


def test_the_file_written_last_is_found_below_a_directory(tmp_path: Path) -> None:
    now = time.time()
    for name, age in (("ckpt_1.pt", 500.0), ("a/ckpt_2.pt", 90.0), ("a/b/new.log", 10.0),
                      (".git/ckpt_3.pt", 5.0), ("later.pt", -60.0)):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"state")
        os.utime(path, (now - age, now - age))
    (tmp_path / "link.pt").symlink_to(tmp_path / "later.pt")
    found = search([str(tmp_path), str(tmp_path / "none")], now - 1000, now)
    assert found is not None and found.path == str(tmp_path / "a" / "ckpt_2.pt")
    assert search([str(tmp_path)], now - 1000, now - 600) is None


def crashed(began: float = 0.0) -> Incident:
    """An incident: the job's ranks were well until 1000 (monotonic), which was seen at 1002."""
    crash = Failure("crash", 1002.0, 1000.0, "n0", 0, signal=9)
    incident = Incident("0-1", 1, diagnose([crash]), 1000.0, 1002.0)
    incident.wall, incident.began, incident.outcome = 50_002.0, began, RECOVERED
    return incident


def test_time_lost_where_no_step_is_seen() -> None:
    incident = crashed(began=100.0)
    incident.steps_seen = False
    estimate(incident, Progress(), SavedFile("/run/ckpt_40.pt", 49_760.0))
    line = incident.line()
    assert "about 4 min lost (estimate: newest file written /run/ckpt_40.pt 4 min before)" in line
    assert "first step not seen" in line and "first_step" not in line
    record = incident.record(7, "0")
    assert (record["lost_s"], record["lost_steps"], record["steps_seen"]) == (240.0, None, False)


def test_no_more_is_lost_than_was_done_since_the_last_restart() -> None:
    incident = crashed(began=950.0)
    estimate(incident, Progress(), SavedFile("/run/ckpt_40.pt", 49_760.0))
    assert incident.lost_s == 50.0


def test_steps_that_are_only_counted_are_estimated_by_their_times() -> None:
    progress = Progress()
    for beats in range(1, 91):
        progress.counted(beats, 100.0 + 10.0 * beats)  # the last one at 1000
    progress.failed()
    progress.new_epoch()
    incident = crashed(began=100.0)
    estimate(incident, progress, SavedFile("/run/ckpt.pt", 49_765.0))  # after step 66
    assert incident.lost_steps == 24
    assert "about 24 steps lost (estimate: newest" in incident.line()


def test_without_a_file_nothing_is_claimed() -> None:
    incident = crashed()
    incident.steps_seen = False
    estimate(incident, Progress(), None)
    assert incident.lost_s is incident.lost_steps is None
    assert "lost time unknown: no checkpoint file of the program was found" in incident.line()


def test_counts_of_a_long_run_stay_few_and_close() -> None:
    progress = Progress()
    for beats in range(1, 30_001):
        progress.counted(beats, float(beats))
    assert len(progress.counts) <= MOST_COUNTS and progress.beats == 30_000
    progress.failed()
    for at in (1.0, 500.5, 29_999.0):
        assert 0 <= int(at) - progress.made_by(at) <= 60
    assert progress.made_by(0.5) == 0


def test_a_job_without_steps_has_an_account() -> None:
    account = Account()
    start = account.started
    account.launched = start + 5.0
    assert not account.estimated(start + 60)
    assert account.unproductive(start + 60, None) == 60.0  # it may still be starting
    assert account.estimated(start + 5 + UNSEEN)
    assert account.unproductive(start + 5 + UNSEEN, None) == pytest.approx(5.0)
    incident = crashed()
    incident.steps_seen = False
    incident.marks = dict.fromkeys(("decide", "stop", "launch", "first_step"), 1010.0)
    incident.lost_s, incident.estimate = 240.0, "newest file"
    account.incident(incident, None)
    assert account.unproductive(start + 60, None) == pytest.approx(5.0 + 10.0 + 240.0)
    assert account.lost_steps is None and account.estimated(start + 60)
    unknown = crashed()
    unknown.steps_seen = False
    account.incident(unknown, None)
    assert account.unproductive(start + 60, None) is None
