"""Jumps of the loss and of the gradient norm: reported once they stay, and never acted on."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf, nan

import pytest
from made_job import Job, beat

from srun_wrapper.job.spikes import LEAST, STAYS, STAYS_SEEN, Series
from srun_wrapper.protocol.messages import Report

CALM = [2.0, 2.1, 1.9, 2.2] * 10


def lines(values: Iterable[float], stride: int = 1, series: Series | None = None) -> list[str]:
    """The lines of a series whose values are read every ``stride`` steps."""
    series = series or Series("loss")
    found = [series.note(0, stride * n, value) for n, value in enumerate(values)]
    return [line for line in found if line]


LONG = max(STAYS, STAYS_SEEN) + 1


@pytest.mark.parametrize(
    ("values", "stride", "reported"),
    [
        (CALM, 1, 0),
        ([*CALM, 11.0, *CALM], 1, 0),  # it heals
        ([*CALM, *[11.0] * (LONG - 1), *CALM], 1, 0),
        ([*CALM, *[11.0] * LONG], 1, 1),
        ([*CALM, *[11.0] * 500], 1, 1),  # once
        ([*CALM, *[11.0] * LONG, *CALM], 1, 2),  # and that it is over
        ([*CALM, *[10.0] * LONG], 1, 0),  # not more than 5 times the median
        ([*CALM, *[11.0, 2.0] * LONG], 1, 0),  # up and down
        ([*CALM, *[11.0] * (STAYS_SEEN - 1)], 50, 0),  # many steps, but few values
        ([*CALM, *[11.0] * STAYS_SEEN], 50, 1),
        ([*CALM[: LEAST - 1], *[11.0] * LONG], 1, 0),  # a start says nothing yet
        ([-v for v in CALM] + [50.0] * LONG, 1, 0),  # a loss that may be negative has no "5 times"
        ([0.0] * 40 + [50.0] * LONG, 1, 0),
        ([2.0 + n for n in range(400)], 1, 0),  # slow growth
    ],
)
def test_a_jump_is_reported_when_it_stays(values: list[float], stride: int, reported: int) -> None:
    assert len(lines(values, stride)) == reported


def test_the_lines() -> None:
    first, last = lines([*[2.0] * 40, *[11.0] * LONG, 2.5])
    assert first == (
        f"warning: loss of rank 0 is more than 5 times its median (2) since step 40: 11 at step "
        f"{40 + STAYS}. The job goes on; if training diverges, stop it and resume from before step "
        "40"
    )
    assert last == (
        f"loss of rank 0 is 2.5 at step {40 + LONG}: less than 5 times its median before step 40 "
        "again"
    )


def told(job: Job) -> list[str]:
    found: list[str] = []
    job.state.on_spike = found.append
    return found


def test_the_lowest_rank_speaks_and_nothing_fails() -> None:
    job = Job()
    found = told(job)
    for step in range(60):
        value = 2.0 if step < 30 else 20.0
        beats = [beat(n, step, step + 1, loss=value, grad_norm=value) for n in (0, 1)]
        job.say(0, Report(1, tuple(beats)))
        job.say(0, Report(1, tuple(beats)))  # the same step twice is one
        job.say(1, Report(1, tuple(beats)))
    assert len(found) == 2 and all("of rank 0 is more" in line for line in found)
    assert not job.state.failures


def test_the_loss_of_the_last_stage_alone() -> None:
    job = Job()
    found = told(job)
    for step in range(60):
        value = 2.0 if step < 30 else 20.0
        job.say(0, Report(1, (beat(0, step, step + 1, grad_norm=1.0),)))
        job.say(1, Report(1, (beat(1, step, step + 1, loss=value),)))
    assert len(found) == 1 and "loss of rank 3 is more" in found[0]


@pytest.mark.parametrize("value", [nan, inf, None])
def test_values_that_are_no_numbers(value: float | None) -> None:
    job = Job()
    found = told(job)
    for step in range(60):
        number = 2.0 if step < 30 else value
        job.say(0, Report(1, (beat(0, step, step + 1, grad_norm=number),)))
    assert not found


def test_a_restart_begins_a_jump_anew() -> None:
    series = Series("loss")
    assert not lines([*CALM, *[11.0] * (LONG - 1)], 1, series)
    series.calm()
    for step in range(len(CALM) - 5, len(CALM) + STAYS):
        assert not series.note(0, step, 11.0 if step >= len(CALM) else 2.0)
    assert series.note(0, len(CALM) + STAYS, 11.0)


def test_ignored_where_that_is_asked_for() -> None:
    job = Job(spike="ignore")
    found = told(job)
    for step in range(90):
        job.say(0, Report(1, (beat(0, step, step + 1, loss=2.0 if step < 30 else 20.0),)))
    assert not found
