"""The ranks that still hold the same."""

from __future__ import annotations

import tracemalloc

import pytest

from robust_slurm.checkpoint.planning.alike import (
    KEPT,
    Claim,
    Comparison,
    Outcome,
    apart,
    differ,
    mark,
)

A, B = mark(7, whole=False), mark(8, whole=False)
ALL_A, ALL_B = mark(7, whole=True), mark(8, whole=True)


@pytest.mark.parametrize(
    ("checksums", "told"),
    [
        ([], False),
        ([A, A], False),
        ([A, B], True),
        ([A, ALL_B], False),  # of other bytes
        ([A, ALL_A, ALL_B], True),
        ([-1, A], False),
        ([-1, -1], False),
    ],
)
def test_differ(checksums: list[int], told: bool) -> None:
    assert differ(checksums) is told


@pytest.mark.parametrize(
    ("claims", "ranks"),
    [
        ({0: Claim((0,), -1), 1: Claim((1,), -1)}, []),
        ({0: Claim((0, 1), A), 1: Claim((0, 1), A)}, []),
        ({0: Claim((0, 1), A), 1: Claim((0, 1), B)}, [0, 1]),
        ({0: Claim((0, 1), A), 1: Claim((1,), -1)}, [0]),  # 1 keeps all of its own
        ({0: Claim((0, 1), A)}, []),  # the other is missing: that is told elsewhere
        ({r: Claim((r % 2, r % 2 + 2), B if r == 3 else A) for r in range(4)}, [1, 3]),
        ({0: Claim((0, 1), A), 1: Claim((0, 1), A), 2: Claim((0, 1, 2), A)}, []),  # 2 keeps nothing
        ({0: Claim((0, 1), A), 1: Claim((0, 1), A), 2: Claim((0, 1, 2), B)}, [2]),
    ],
)
def test_apart(claims: dict[int, Claim], ranks: list[int]) -> None:
    assert apart(claims) == ranks


@pytest.mark.parametrize(
    ("reports", "told"),
    [
        ([(0, A), (1, A), (2, A), (3, A)], ["alike"]),
        ([(0, A), (1, A), (2, A), (2, A)], []),  # one has yet to report
        ([(0, A), (1, A), (2, B)], ["open"]),
        ([(0, A), (1, A), (2, B), (3, A)], ["open", "2"]),
        ([(2, B), (0, A), (1, A), (3, A)], ["open", "open", "2"]),
        ([(0, A), (1, A), (2, A), (3, ALL_B)], []),  # of other bytes
        ([(0, ALL_A), (1, ALL_A), (2, ALL_B), (3, A)], ["open"]),
        ([(0, A), (1, B), (2, B), (3, A)], ["open", "open", "apart"]),
        ([(0, A), (1, B), (2, mark(9, whole=False))], ["open", "apart"]),
        ([(0, A), (1, B), (2, B), (3, mark(9, whole=False))], ["open", "open", "apart"]),
        ([(2, B), (2, A), (0, A), (1, A), (3, A)], ["open", "open", "2"]),  # its first word counts
    ],
)
def test_who_differs_of_four(reports: list[tuple[int, int]], told: list[str]) -> None:
    seen, found = Comparison(), []
    for rank, same in reports:
        found += seen.add(0, range(4), rank, [(7, same)])
    assert [_told(each) for each in found] == told
    assert all(each.step == 7 for each in found)


def _told(found: Outcome) -> str:
    if not found.differ:
        return "alike"
    return "open" if found.open else "apart" if found.odd is None else str(found.odd)


@pytest.mark.parametrize(("ranks", "odd"), [(2, None), (3, 0)])
def test_of_two_that_differ_nobody_knows_who_is_wrong(ranks: int, odd: int | None) -> None:
    seen = Comparison()
    found = [seen.add(0, range(ranks), r, [(7, ALL_A if r else ALL_B)]) for r in range(ranks)][-1]
    assert [(each.odd, each.whole, each.open) for each in found] == [(odd, True, False)]


@pytest.mark.slow
def test_a_rank_that_does_not_report_costs_no_memory() -> None:
    """Every step waits for it, in robust-srun and for each of ten thousand ranks."""
    seen, members = Comparison(), range(1000)
    tracemalloc.start()
    try:
        for step in range(50):
            for rank in members[1:]:
                seen.add(0, members, rank, [(step, mark(1000 + step, whole=False))])
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()
    assert seen.add(0, members, 0, [(49, mark(1049, whole=False))]) == [Outcome(49, False)]


def test_a_comparison_remembers_the_newest_steps() -> None:
    seen, pair = Comparison(), (0, 1)
    assert seen.add(0, pair, 0, [(step, A) for step in range(2 * KEPT)]) == []
    assert seen.add(0, pair, 1, [(0, B)]) == []  # too long ago
    (found,) = seen.add(0, pair, 1, [(2 * KEPT - 1, B)])
    assert found.differ == f"ranks 0 and 1 differ at step {2 * KEPT - 1}"
    seen.add(0, pair, 0, [(5 * KEPT, A)])
    seen.forget(0)
    assert seen.add(0, pair, 1, [(5 * KEPT, B)]) == []
