"""The ranks that still hold the same."""

from __future__ import annotations

import pytest

from robust_slurm.checkpoint.planning.alike import KEPT, Claim, Comparison, apart, differ, mark

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


def test_a_comparison_remembers_the_newest_steps() -> None:
    seen = Comparison()
    assert seen.add(0, 0, [(step, A) for step in range(2 * KEPT)]) == ""
    assert seen.add(0, 1, [(0, B)]) == ""  # too long ago
    assert seen.add(0, 1, [(2 * KEPT - 1, B)]) == f"ranks 0 and 1 differ at step {2 * KEPT - 1}"
    seen.forget(0)
    assert seen.add(0, 1, [(2 * KEPT - 1, A)]) == ""
