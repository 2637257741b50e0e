"""bench.fewer: when a machine is lost, and which steps of replicas count."""

from __future__ import annotations

import pytest

from bench.fewer.__main__ import LONG
from bench.fewer.sides import committed
from bench.fewer.site import Schedule


@pytest.mark.parametrize(
    ("schedule", "losses"),
    [
        (LONG, [60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 420.0, 480.0, 540.0]),
        (Schedule(100.0, 60.0, 30.0), [60.0]),
        (Schedule(90.0, 60.0, 30.0), [60.0]),  # repaired at the very end
        (Schedule(89.0, 60.0, 30.0), []),
    ],
)
def test_each_machine_that_is_lost_is_replaced_in_the_time(
    schedule: Schedule, losses: list[float]
) -> None:
    assert schedule.losses() == losses


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ([1152, 1152, 236, 1152], 1152),  # one has just come: its step was taken for all
        ([1152, 236, 236, 236], 236),  # one went on alone
        ([10, 10, 9, 9], 9),
        ([10, 10, 9], 10),
        ([7], 7),
    ],
)
def test_a_step_counts_when_a_majority_of_the_replicas_has_committed_it(
    steps: list[int], counts: int
) -> None:
    assert committed(steps) == counts
