"""Error counters that have grown, as an incident shows them."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.counters import MOST, Counted, lines

SYMBOL = "mlx5_0 port 1 symbol_error"


@pytest.mark.parametrize(
    ("nodes", "suspects", "expected"),
    [
        ([], (), ()),
        ([Counted("n3", {}, {})], ("n3",), ()),
        ([Counted("n3", {SYMBOL: 412}, {})], (), (f"n3: {SYMBOL} +412 since the step began",)),
        ([Counted("n3", {SYMBOL: 412}, {SYMBOL: 412})], (), ()),
        (
            [Counted("n3", {SYMBOL: 417}, {SYMBOL: 412})],
            (),
            (f"n3: {SYMBOL} +5 since an earlier incident, +417 since the step began",),
        ),
        (  # the largest first
            [Counted("n1", {"a": 1, "b": 3}, {}), Counted("n2", {"a": 2}, {})],
            (),
            tuple(f"{what} since the step began" for what in ("n1: b +3", "n2: a +2", "n1: a +1")),
        ),
        (  # but a suspect's before all others
            [Counted("n1", {"a": 9}, {}), Counted("n2", {"a": 2}, {})],
            ("n2",),
            tuple(f"{what} since the step began" for what in ("n2: a +2", "n1: a +9")),
        ),
    ],
)
def test_what_is_shown(
    nodes: list[Counted], suspects: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert lines(nodes, suspects) == expected


def test_many_are_cut() -> None:
    found = lines([Counted("n1", {str(n): n + 1 for n in range(MOST + 3)}, {})])
    assert len(found) == MOST + 1 and found[-1] == "and 3 more counters"
