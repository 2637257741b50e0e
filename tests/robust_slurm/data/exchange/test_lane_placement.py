"""The placement of lanes on nodes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as some

from robust_slurm.data.exchange.placement import numbered, preference


def readers(lane: int, nodes: int, away: set[int]) -> list[int]:
    return [place for place in preference(lane, nodes) if place not in away][:2]


def test_a_few_placements() -> None:
    lanes = numbered([("web", 1), ("code", 0), ("web", 0)])
    assert lanes == {("code", 0): 0, ("web", 0): 1, ("web", 1): 2}
    assert [list(preference(lane, 1)) for lane in range(2)] == [[0], [0]]
    assert [list(preference(lane, 2)) for lane in range(3)] == [[0, 1], [1, 0], [0, 1]]
    assert [list(preference(lane, 3)) for lane in range(6)] == [
        [0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 2, 1], [1, 0, 2], [2, 1, 0],
    ]  # fmt: skip


@given(nodes=some.integers(2, 20), turns=some.integers(1, 4), data=some.data())
def test_even_and_only_the_lanes_of_who_leaves_move(
    nodes: int, turns: int, data: some.DataObject
) -> None:
    lanes = range(nodes * (nodes - 1) * turns)
    for lane in lanes:
        assert sorted(preference(lane, nodes)) == list(range(nodes))
    for which in range(2):
        load = Counter(readers(lane, nodes, set())[which] for lane in lanes)
        assert len(load) == nodes and len(set(load.values())) == 1
    away = data.draw(some.sets(some.integers(0, nodes - 1), max_size=nodes - 1))
    leaves = data.draw(some.sampled_from(sorted({*range(nodes)} - away)))
    for lane in lanes:
        before, after = readers(lane, nodes, away), readers(lane, nodes, away | {leaves})
        assert len(before) == min(2, nodes - len(away)) == len(set(before))
        if leaves not in before:
            assert after == before
        else:
            before.remove(leaves)
            assert after[: len(before)] == before, "the shadow becomes the owner"
    owners = Counter(readers(lane, nodes, {leaves})[0] for lane in lanes)
    assert len(set(owners.values())) == 1, "its lanes are shared by all others"
