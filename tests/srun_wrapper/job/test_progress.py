"""The progress of a training, by numbered, counted and saved steps."""

from __future__ import annotations

import pytest
from made_job import Job, beat

from srun_wrapper.job.progress import Progress
from srun_wrapper.protocol.messages import Report


def test_progress_by_number() -> None:
    job = Job()
    job.say(0, Report(1, (beat(0, 100, 1), beat(1, 100, 1))))
    job.say(1, Report(1, (beat(0, 101, 2),)))
    progress = job.state.progress
    assert (progress.best, progress.beats, progress.resume) == (101, 2, 100)
    assert progress.numbered and progress.since_failure()
    progress.failed()
    assert job.state.new_epoch() == 2
    job.say(0, Report(1, (beat(0, 500, 9),)))  # of the old epoch
    assert progress.best == 101
    job.say(0, Report(2, (beat(0, 99, 1),)))
    assert progress.resume == 99 and not progress.since_failure()
    job.say(0, Report(2, (beat(0, 102, 4),)))
    assert progress.since_failure()


@pytest.mark.parametrize(
    ("source", "regex", "numbered"),
    [
        ("explicit", "", True),
        ("auto", "", False),
        ("regex", r"step (\d+)", True),
        ("regex", "done with a step", False),  # it counts from 1 wherever training resumed
    ],
)
def test_which_sources_number_steps(source: str, regex: str, numbered: bool) -> None:
    job = Job(progress_regex=regex)
    job.say(0, Report(1, (beat(0, 3, 3, source=source),)))
    assert job.state.progress.numbered is numbered
    assert job.state.progress.best == (3 if numbered else None)


@pytest.mark.parametrize(
    ("before", "now", "progress"),
    [
        (None, 0, False),
        (None, 5, True),
        (100, 0, False),
        (100, 100, False),
        (100, 105, False),
        (100, 120, True),
        (100, 20, True),
        (3, 5, False),
        (0, 3, True),
    ],
)
def test_progress_by_counting(before: int | None, now: int, progress: bool) -> None:
    assert Progress(beats=now, beats_at_failure=before).since_failure() is progress


@pytest.mark.parametrize(
    ("beats", "at_failure", "saved", "saved_at_failure", "progress"),
    [
        (100, 100, 580, 500, True),  # as many steps as before, but further on
        (100, 100, 500, 500, False),
        (300, 100, 480, 500, False),  # more steps, and not as far
        (5, None, 5, None, True),
        (0, 100, 580, 500, False),
        (100, 100, None, None, False),
    ],
)
def test_progress_by_saved_steps(
    beats: int,
    at_failure: int | None,
    saved: int | None,
    saved_at_failure: int | None,
    progress: bool,
) -> None:
    now = Progress(beats=beats, beats_at_failure=at_failure, saved=saved)
    now.saved_at_failure = saved_at_failure
    assert now.since_failure() is progress


def test_progress_knows_that_a_step_was_ever_made() -> None:
    progress = Progress()
    progress.new_epoch()
    assert not progress.stepped
    progress.beats = 3
    assert progress.stepped
    for _ in range(2):
        progress.failed()
        progress.new_epoch()
        assert progress.stepped and progress.beats == 0


def test_reports_of_spares_and_lost_nodes_count_nothing() -> None:
    job = Job()
    job.say(2, Report(1, (beat(0, 9, 9),)))
    job.state.lose(job.node(1), "gone")
    job.say(1, Report(1, (beat(0, 9, 9),)))
    assert job.state.progress.beats == 0
