"""The time at which a silent node whose kernel answers is lost, by what the others do."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.mute import mute_at, steps_on

LIMIT, LONGEST, HEARD = 15.0, 600.0, 100.0


@pytest.mark.parametrize(
    ("stepped", "unusual", "lost"),
    [
        (100.1, 2.0, 115.1),  # the whole job stands
        (160.0, 2.0, 175.0),  # it has stepped on for a minute
        (90.0, 2.0, 115.0),  # its own word is the newest
        (100.1, 90.0, 190.1),  # one step takes half a minute
        (100.1, None, 700.0),  # start-up, a phase, the end, or no steps are seen
        (160.0, None, 700.0),
        (0.0, 0.0, 115.0),
    ],
)
def test_when_it_is_lost(stepped: float, unusual: float | None, lost: float) -> None:
    assert mute_at(HEARD, stepped, unusual, LIMIT, LONGEST) == pytest.approx(lost)


def test_a_limit_above_the_longest_counts() -> None:
    assert mute_at(HEARD, 0.0, None, 900.0, LONGEST) == HEARD + 900.0


@pytest.mark.parametrize(
    ("after", "step_time", "on"),
    [
        (0.0, 0.1, False),
        (0.25, 0.1, False),  # steps under way, and one whose report was late
        (0.4, 0.1, True),
        (0.4, 1.0, False),
        (60.0, None, False),  # nobody knows how long a step takes
    ],
)
def test_whether_steps_show_that_its_ranks_live(
    after: float, step_time: float | None, on: bool
) -> None:
    assert steps_on(HEARD + after, HEARD, step_time) is on
