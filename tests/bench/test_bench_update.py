"""The time of an update as bench.update takes it: all ranks' first step, on the new code only."""

import json
from pathlib import Path

import pytest

from bench.common import BenchError
from bench.training.job import Training
from bench.training.rank import FIRST_STEPS
from bench.update import RANKS as RANKS_OF
from bench.update import Job

RANKS = RANKS_OF["toy"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose second version is requested at 100; all ranks have stepped at 100.5 to 104."""
    (tmp_path / "proj").mkdir()
    found = Job(Training(None, "toy", RANKS, tmp_path), "srun", version=0)  # type: ignore[arg-type]
    found.edit()
    found.edit()
    found.requested = 100.0
    times = [(rank, at) for at in (50.0, 100.5) for rank in range(RANKS)]
    times[-1] = (RANKS - 1, 104.0)
    lines = [json.dumps({"rank": rank, "time": at, "step": 1}) for rank, at in times]
    (tmp_path / FIRST_STEPS).write_text("\n".join(lines) + "\n")
    for rank in range(RANKS):
        (tmp_path / f"ran.{rank}").write_text("2")
    return found


def test_the_last_rank_counts(job: Job) -> None:
    assert job.took() == 4.0
    job.requested = 101.0
    assert not job.stepped()


def test_old_code_is_no_update(job: Job) -> None:
    (job.training.directory / "ran.3").write_text("1")
    with pytest.raises(BenchError, match="ran, not 2"):
        job.took()
