"""The step time against its own past: when a job is slow, and when it only looks like that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from srun_wrapper.job.pace import WARM_UP, Pace
from srun_wrapper.job.tempo import PERIODS, USUAL, Tempo


def after(*parts: tuple[int, float], window: float = 8.0) -> Tempo:
    """Return the tempo after so many steps of so many seconds each."""
    tempo = Tempo(window)
    for steps, seconds in parts:
        for _ in range(steps):
            tempo.add(seconds, 1)
    return tempo


def test_steps_of_another_size_are_not_held_against_those_before() -> None:
    """Each rank has more to do in a step, after a job has gone on with fewer nodes."""
    tempo = after((40, 0.5), (2, 1.0))
    tempo.forget()
    for _ in range(40):
        tempo.add(1.0, 1)
    assert tempo.slow() is None and tempo.usual() == 1.0


EVAL = tuple((1, 5.0) if n % 9 == 8 else (1, 0.5) for n in range(90))


@pytest.mark.parametrize(
    ("parts", "slow"),
    [
        (((40, 0.5),), False),
        (((40, 0.5), (40, 0.7)), True),
        (((40, 0.5), (40, 0.6)), False),  # not by enough
        (((40, 0.5), (9, 0.7)), False),  # not for long enough
        (((40, 0.5), (9, 5.0), (40, 0.5)), False),  # a stall that is over
        (((8, 0.5), (40, 5.0)), False),  # no past to compare with
        (((40, 0.5), *EVAL), False),  # one long step among many: a save, an evaluation
        (((30, 20.0), (15, 30.0)), True),  # steps longer than a period
        (((30, 20.0), (6, 30.0)), False),
        (((40, 0.7), (40, 0.5)), False),  # faster
    ],
)  # fmt: skip
def test_when_a_job_is_slow(parts: Sequence[tuple[int, float]], slow: bool) -> None:
    assert (after(*parts).slow() is not None) is slow


def test_how_slow_it_is() -> None:
    found = after((40, 0.5), (40, 0.75)).slow()
    assert found is not None
    assert (found.now, found.usual) == (0.75, 0.5)
    assert found.factor == pytest.approx(1.5)


def test_an_accepted_step_time_is_the_usual_one() -> None:
    tempo = after((40, 0.5), (40, 0.75))
    tempo.accept(0.75)
    assert tempo.slow() is None and tempo.usual() == 0.75
    for _ in range(16):
        tempo.add(1.0, 1)
    assert tempo.slow() is not None  # slower still
    assert not tempo.eased(0.75)
    for _ in range(8):
        tempo.add(0.75, 1)
    assert tempo.eased(0.75)


def test_a_long_past_is_forgotten() -> None:
    assert len(after((8 * USUAL, 0.5)).periods) == USUAL + PERIODS


def test_only_steps_outside_of_phases_and_start_up_count() -> None:
    pace = Pace(10.0, 600.0, 1800.0)
    pace.new_epoch(0.0)
    for step in range(WARM_UP):
        pace.advance(step + 1.0, 1)
    assert not pace.tempo._reports
    pace.advance(WARM_UP + 1.0, 1)
    assert pace.tempo._reports == [1.0]
    pace.in_phase("eval", WARM_UP + 1.5, WARM_UP + 1.5)
    pace.advance(WARM_UP + 9.0, 1)
    assert pace.tempo._reports == [1.0]
    pace.new_epoch(100.0)
    assert not pace.tempo._reports
