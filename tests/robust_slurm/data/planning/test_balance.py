"""The balance of a plan: rows that hold no more than they can, groups of about the same cost."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.data.balance import imbalance
from robust_slurm.data.planning.balance import into_groups, into_rows


@settings(deadline=None)
@given(st.lists(st.integers(1, 64), max_size=60), st.integers(1, 4), st.integers(1, 3))
def test_rows_hold_no_more_than_they_can_and_nothing_is_lost(
    tokens: list[int], shares: int, rows: int
) -> None:
    packed = into_rows(tokens, [n**2 for n in tokens], min(3, len(tokens)), shares, rows, 64)
    placed = [item for share in packed.rows for row in share for item in row]
    assert sorted(placed + packed.left) == list(range(len(tokens)))
    assert all(sum(tokens[i] for i in row) <= 64 for share in packed.rows for row in share)
    room = max(64 - sum(tokens[i] for i in row) for share in packed.rows for row in share)
    assert all(tokens[item] > room for item in packed.left)
    assert tokens == [] or 0 in placed  # the first always fits: nothing waits forever
    assert len(tokens) < shares or all(any(share) for share in packed.rows)


@pytest.mark.parametrize("costs", [[0.1, 1000.0, 10.0], [0.0] * 3])
def test_no_rank_is_without_a_sample_however_few_there_are(costs: list[float]) -> None:
    packed = into_rows([10, 50, 10], costs, 1, 3, 1, 100)
    assert [len(row) for share in packed.rows for row in share] == [1, 1, 1]


def test_costs_are_summed_up_alike_by_all_versions_of_python() -> None:
    assert into_rows([32, 16, 16, 32], [0.2, 0.1, 0.2, 0.2], 0, 2, 1, 100).rows == [
        [[0, 2]],
        [[3, 1]],
    ]


def test_groups_have_as_many_items_and_about_the_same_cost() -> None:
    draw = random.Random(2)
    for groups, each in ((1, 5), (4, 1), (8, 4), (3, 50)):
        costs = [draw.lognormvariate(0, 1) for _ in range(groups * each)]
        found = into_groups(costs, groups)
        assert sorted(item for group in found for item in group) == list(range(len(costs)))
        assert {len(group) for group in found} == {each}
        sums = [sum(costs[item] for item in group) for group in found]
        in_order = [sum(costs[g * each : (g + 1) * each]) for g in range(groups)]
        assert imbalance(sums) <= imbalance(in_order) + 1e-9
    assert into_groups([8, 7, 6, 5, 4, 3, 2, 1], 2) == [[0, 3, 5, 6], [1, 2, 4, 7]]
