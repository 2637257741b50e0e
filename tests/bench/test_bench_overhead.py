"""bench.overhead: seconds of a training in which no step ended."""

from __future__ import annotations

import pytest

from bench.overhead.driver import filled


@pytest.mark.parametrize(
    ("seconds", "means"),
    [
        ([0.1, 0.2], [0.1, 0.2]),
        ([0.1, None, 1.5, 0.1], [0.1, 1.5, 1.5, 0.1]),
        ([None, None, 2.5], [2.5, 2.5, 2.5]),
        ([0.1, None], [0.1]),  # the training ended in it
    ],
)
def test_a_second_without_a_step_has_that_of_the_next(
    seconds: list[float | None], means: list[float]
) -> None:
    assert filled(seconds) == means
