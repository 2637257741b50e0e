"""The interval of saved steps: the cost of snapshots decides, for all ranks alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.planning.interval import (
    FEWEST,
    NARROW,
    WIDEN,
    Cost,
    Interval,
    least,
    ordinal,
)


@pytest.mark.parametrize(
    ("cost", "every", "wanted"),
    [
        (Cost(5.0, 0.0, 0.0, 4.0), 1, 1),  # hidden behind one step
        (Cost(5.0, 0.0, 9.0, 14.0), 1, 3),  # the network takes 14 s
        (Cost(0.12, 0.001, 1.98, 2.1), 1, 17),  # 12.6 MB over 6 MB/s
        (Cost(1.0, 0.1, 0.0, 0.2), 1, 4),  # the copy itself costs 10 %
        (Cost(1.0, 0.02, 0.0, 0.2), 1, 1),
        (Cost(1.0, 0.0, 0.2, 0.9), 1, 2),  # less than a step, but more than its backward pass
        (Cost(1.0, 0.0, 0.2, 0.9), 2, 1),
        (Cost(0.0, 0.0, 0.0, 1.0), 1, 10_000),
    ],
)
def test_the_fewest_steps_that_keep_to_three_percent(cost: Cost, every: int, wanted: int) -> None:
    assert least(cost, 0.03, every) == wanted


seconds = st.floats(0.001, 100.0)


@given(seconds, st.floats(0.0, 10.0), seconds, st.floats(0.001, 0.5))
def test_it_keeps_to_the_bound_and_no_shorter_one_does(
    step: float, blocked: float, replica: float, overhead: float
) -> None:
    cost = Cost(step, blocked, 0.0, replica)
    found = least(cost, overhead, 2)

    def keeps(n: int) -> bool:
        spent = blocked + max(0.0, replica - n * step)
        return spent <= overhead * n * step * (1 + 1e-6)

    if found < 10_000:
        assert keeps(found)
    if found > 1:
        assert not keeps(found - 1) or found == 10_000 or abs(replica - step) < 1e-3


DEAR, CHEAP = Cost(1.0, 0.0, 2.0, 3.0), Cost(1.0, 0.0, 0.0, 0.1)


def fed(interval: Interval, costs: dict[int, Cost], first: int = 1) -> None:
    for step in range(first, first + FEWEST):
        for rank, cost in costs.items():
            interval.hear(rank, step, cost)


def test_it_widens_for_the_slowest_rank_and_narrows_again() -> None:
    interval = Interval(0.03)
    fed(interval, {0: CHEAP, 1: DEAR})
    assert not interval.adjust(100.0, 20)
    assert not interval.adjust(100.0 + WIDEN - 0.1, 20)
    assert interval.adjust(100.0 + WIDEN, 20)
    assert (interval.every, interval.first) == (3, 20)
    assert "every 3rd step (rank 1: a snapshot and its replica take 3 s" in interval.text()
    fed(interval, {0: CHEAP, 1: CHEAP}, first=15)  # from before it held
    assert not interval.adjust(200.0, 50)
    fed(interval, {0: CHEAP, 1: CHEAP}, first=21)
    assert not interval.adjust(201.0, 60)
    assert interval.adjust(201.0 + NARROW, 70)
    assert (interval.every, interval.first) == (1, 70)
    assert interval.text().startswith("every step")


def test_what_passes_changes_nothing() -> None:
    interval = Interval(0.03)
    fed(interval, {0: DEAR})
    assert not interval.adjust(100.0, 20)
    for step in range(10, 16):
        interval.hear(0, step, CHEAP)
    assert not interval.adjust(105.0, 20)
    for step in range(20, 26):
        interval.hear(0, step, DEAR)
    assert not interval.adjust(100.0 + WIDEN, 20)
    assert interval.every == 1


def test_a_link_that_is_just_fast_enough_is_not_tried_again_and_again() -> None:
    interval = Interval(0.03)
    fed(interval, {0: Cost(1.0, 0.0, 0.3, 1.3)})
    interval.adjust(0.1, 10)
    assert interval.adjust(0.1 + WIDEN, 10) and interval.every == 2
    fed(interval, {0: Cost(1.0, 0.0, 0.0, 0.9)}, first=11)
    interval.adjust(50.0, 20)
    assert not interval.adjust(50.0 + NARROW, 20)


def test_without_a_bound_every_step_is_saved() -> None:
    interval = Interval(0.0)
    fed(interval, {0: DEAR})
    assert not interval.adjust(1.0, 5) and not interval.adjust(1.0 + WIDEN, 5)


@pytest.mark.parametrize(
    ("every", "text"),
    [(1, "every step"), (2, "every 2nd step"), (3, "every 3rd step"), (11, "every 11th step"),
     (21, "every 21st step"), (112, "every 112th step")],
)  # fmt: skip
def test_ordinals(every: int, text: str) -> None:
    assert ordinal(every) == text
