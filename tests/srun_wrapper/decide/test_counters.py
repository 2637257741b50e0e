"""Error counters that have grown, as an incident shows them."""

from __future__ import annotations

import pytest

from srun_wrapper.decide.counters import MOST, OF_NODE, NodeGrowth, lines, news

SYMBOL = "mlx5_0 port 1 symbol_error"


@pytest.mark.parametrize(
    ("nodes", "suspects", "expected"),
    [
        ([], (), ()),
        ([NodeGrowth("n3", {}, {})], ("n3",), ()),
        (
            [NodeGrowth("n3", {SYMBOL: 412}, {})],
            (),
            (f"n3: {SYMBOL} +412 since robust-task began there",),
        ),
        ([NodeGrowth("n3", {SYMBOL: 412}, {SYMBOL: 412})], (), ()),
        (
            [NodeGrowth("n3", {SYMBOL: 417}, {SYMBOL: 412})],
            (),
            (f"n3: {SYMBOL} +5 since it was last shown, +417 since robust-task began there",),
        ),
        (  # the largest first
            [NodeGrowth("n1", {"a": 1, "b": 3}, {}), NodeGrowth("n2", {"a": 2}, {})],
            (),
            tuple(
                f"{what} since robust-task began there"
                for what in ("n1: b +3", "n2: a +2", "n1: a +1")
            ),
        ),
        (  # but the gravest before them
            [
                NodeGrowth(
                    "n1", {"a": 9, "eth0 carrier_down_count": 1, "PCIe x fatal errors": 1}, {}
                )
            ],
            (),
            tuple(
                f"n1: {what} since robust-task began there"
                for what in ("PCIe x fatal errors +1", "eth0 carrier_down_count +1", "a +9")
            ),
        ),
        (  # and a suspect's before all others
            [NodeGrowth("n1", {"a": 9}, {}), NodeGrowth("n2", {"a": 2}, {})],
            ("n2",),
            tuple(f"{what} since robust-task began there" for what in ("n2: a +2", "n1: a +9")),
        ),
    ],
)
def test_what_is_shown(
    nodes: list[NodeGrowth], suspects: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert lines(nodes, suspects) == expected


def test_many_are_cut() -> None:
    found = lines([NodeGrowth("n1", {str(n): n + 1 for n in range(MOST + 3)}, {})])
    assert len(found) == MOST + 1 and found[-1] == "and 3 more counters"


def test_an_event_has_what_is_new_of_a_node_and_no_more_than_64() -> None:
    now = {"a": 5, "b": 2, "mlx5_0 port 1 symbol_error": 1}
    assert news(NodeGrowth("n1", now, {"b": 2, "a": 1})) == [
        "mlx5_0 port 1 symbol_error +1 since robust-task began there",
        "a +4 since it was last shown, +5 since robust-task began there",
    ]
    assert len(news(NodeGrowth("n1", {str(n): 1 for n in range(2 * OF_NODE)}, {}))) == OF_NODE
