"""The change of a world's size: who leaves, the numbers, the shares; tables and properties."""

from __future__ import annotations

import random
from typing import Any

import pytest

from robust_slurm.resizing.change import fewer, more, owners, replicas
from robust_slurm.resizing.shares import holder, holders_of_blocks, read_resized, shares_of

ONE_EACH = [(0,), (1,), (2,), (3,)]
TWO_EACH = [(0, 1), (2, 3), (4, 5), (6, 7)]
CYCLIC = [(0, 2), (1, 3)]
SHARDED = [(0, 2, 4, 6), (1, 3, 5, 7)]  # HSDP: a replica is on two places of TWO_EACH


@pytest.mark.parametrize(
    ("ranks", "lost", "groups", "places", "numbers", "origin", "left"),
    [
        (ONE_EACH, [1], [range(4)], (0, 2, 3), ((0,), (1,), (2,)), [0, 2, 3], ((1,),)),
        (ONE_EACH, [0, 3], [range(4)], (1, 2), ((0,), (1,)), [1, 2], ((0,), (3,))),
        (TWO_EACH, [2], [range(8)], (0, 1, 3), ((0, 1), (2, 3), (4, 5)), [0, 1, 2, 3, 6, 7],
         ((2,),)),
        (CYCLIC, [0], [range(4)], (1,), ((0, 1),), [1, 3], ((0,),)),
        # Two shards, a replica on each node: the node's replica leaves, and no other.
        (TWO_EACH, [0], SHARDED, (1, 2, 3), ((0, 1), (2, 3), (4, 5)), [2, 3, 4, 5, 6, 7], ((0,),)),
        # A replica on two nodes: the healthy one leaves as well, and comes back only with both.
        (ONE_EACH, [1], [(0, 2), (1, 3)], (2, 3), ((0,), (1,)), [2, 3], ((0, 1),)),
    ],
)  # fmt: skip
def test_whole_replicas_leave_and_the_others_keep_their_order(
    ranks: Any, lost: Any, groups: Any, places: Any, numbers: Any, origin: Any, left: Any
) -> None:
    found = fewer(ranks, lost, groups, 1)
    assert (found.places, found.ranks, found.left) == (places, numbers, left)
    assert [found.origin[new] for new in range(found.new)] == origin
    assert not found.anew


@pytest.mark.parametrize(
    ("ranks", "lost", "groups", "least", "why"),
    [
        (ONE_EACH, [1], [range(4)], 4, "3 nodes would be left, min_nodes is 4"),
        (ONE_EACH, [1], [], 1, "a state that no other rank holds"),
        (ONE_EACH, [1], [(0, 1), (2,)], 1, "a state that no other rank holds"),
        (ONE_EACH, [1], [(0, 1, 2), (3,)], 1, "groups of different sizes"),
        (ONE_EACH, [1], [(0,), (1,), (2,), (3,)], 1, "groups of different sizes"),
        (ONE_EACH, [0, 3], [(0, 2), (1, 3)], 1, "every replica of the model"),
        ([(0, 1, 2), (3, 4, 5)], [1], [(0, 1, 2, 3, 4, 5)], 2, "1 node would be left"),
        ([(0, 2), (1,), (3,)], [1], [(0, 2), (1, 3)], 1, "only some of its ranks"),
    ],
)
def test_says_why_a_world_cannot_be_smaller(
    ranks: Any, lost: Any, groups: Any, least: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        fewer(ranks, lost, groups, least)


def test_replicas_are_the_ranks_at_the_same_place_of_their_groups() -> None:
    assert replicas(4, [range(4)]) == [{0}, {1}, {2}, {3}]
    assert replicas(6, [(0, 2, 4), (1, 3, 5)]) == [{0, 1}, {2, 3}, {4, 5}]


def test_worlds_shrink_and_grow_and_every_share_is_computed_once_with_its_position() -> None:
    """Random losses and returns: numbers without a gap, every share at one rank, and whoever gets
    a share gets the snapshot of the rank that had it."""
    chance = random.Random(5)
    for _ in range(200):
        nodes, each = chance.randint(2, 9), chance.randint(1, 3)
        full = [tuple(range(p * each, (p + 1) * each)) for p in range(nodes)]
        ranks, home, original = full, list(range(nodes)), nodes * each
        for _ in range(6):
            missing = sorted(set(range(nodes)) - set(home))
            if missing and chance.random() < 0.5:
                come = chance.sample(missing, chance.randint(1, len(missing)))
                change = more(ranks, full, home, come)
                home = sorted([*home, *come])
                assert len(change.anew) == each * len(come)
            elif len(home) > 1:
                lost = chance.sample(range(len(home)), chance.randint(1, len(home) - 1))
                change = fewer(ranks, lost, [range(len(ranks) * each)], 1)
                home = [home[place] for place in change.places]
            else:
                continue
            ranks = list(change.ranks)
            assert sorted(r for own in ranks for r in own) == list(range(change.new))
            assert change.new == each * len(home)
            need = owners(change.origin, change.old, change.new, original)
            computed = []
            for rank in range(change.new):
                computed += shares_of(rank, change.new, original)
                assert need[rank][0] == change.origin[rank] < change.old
                for share in shares_of(rank, change.new, original):
                    assert holder(share, change.new) == rank
                    assert holder(share, change.old) in need[rank]
            assert sorted(computed) == list(range(original))
            kept = [old for new, old in change.origin.items() if new not in change.anew]
            assert len(set(kept)) == len(kept)
        if len(home) < nodes:
            change = more(ranks, full, home, set(range(nodes)) - set(home))
            assert list(change.ranks) == full


def test_whoever_has_a_part_of_a_block_is_named_and_nobody_else() -> None:
    """A holder is a rank whose rows, cut as ``torch.chunk`` does, overlap the new rank's."""

    def rows(rank: int, size: int, length: int) -> set[int]:
        each = -(-length // size)
        return set(range(length)[rank * each : (rank + 1) * each])

    for size, old in [(3, 4), (4, 3), (1, 4), (4, 1), (7, 8), (8, 7), (5, 5)]:
        for lengths in [(1,), (2, 5), (64,), (8, 9, 63, 257), (100, 3), ()]:
            for rank in range(size):
                wanted = {
                    other
                    for other in range(old)
                    for length in lengths
                    if rows(rank, size, length) & rows(other, old, length)
                }
                assert holders_of_blocks(rank, size, old, lengths) == tuple(sorted(wanted))
    need = owners({0: 0, 1: 2, 2: 3}, 4, 3, 4, (16,))
    assert need == {0: (0, 3, 1), 1: (2, 1), 2: (3, 2)}


def test_shares_differ_by_one_at_most() -> None:
    for size in range(1, 9):
        counts = [len(shares_of(rank, size, 8)) for rank in range(size)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == 8


@pytest.mark.parametrize(
    ("text", "found"),
    [("4:3", (4, 3)), ("", None), ("4", None), ("3:4", None), ("4:0", None), ("a:b", None)],
)
def test_reads_only_a_smaller_world(text: str, found: tuple[int, int] | None) -> None:
    assert read_resized(text) == found
