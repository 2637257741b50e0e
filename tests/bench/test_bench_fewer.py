"""bench.fewer: when a machine is lost."""

from __future__ import annotations

import pytest

from bench.fewer.__main__ import LONG
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
