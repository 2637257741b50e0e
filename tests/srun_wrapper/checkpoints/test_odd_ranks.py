"""One rank that differs from all that share its state: the judgement, and whose fault it is."""

from __future__ import annotations

import pytest

from robust_slurm.checkpoint.planning.alike import Outcome
from srun_wrapper.checkpoints.odd_ranks import CONFIRM, RECENT, SETTLE, Agreement, OddRank, judge

FEW, WHOLE = False, True


def alike(step: int, whole: bool = WHOLE) -> Outcome:
    return Outcome(step, whole)


def odd(step: int, rank: int = 2, whole: bool = WHOLE) -> Outcome:
    return Outcome(step, whole, "they differ", rank)


def apart(step: int, *, waits: bool = False) -> Outcome:
    return Outcome(step, WHOLE, "they differ", open=waits)


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([alike(10), odd(20), odd(30)], "rank 2"),
        ([alike(9, FEW), odd(20), odd(30)], "rank 2"),
        ([alike(10), odd(11, whole=FEW), odd(12, whole=FEW), odd(20)], "rank 2"),
        ([alike(10), odd(11), odd(12, whole=FEW)], "rank 2"),
        # Tensors of other strides make portions differ, and never all bytes.
        ([alike(10), odd(11, whole=FEW), odd(12, whole=FEW)], "waits"),
        ([alike(10), odd(11, whole=FEW), odd(12, whole=FEW), alike(20)], "apart"),
        ([alike(10), odd(11, whole=FEW), odd(20)], "rank 2"),
        # Two items of each tensor do not show what all bytes showed.
        ([alike(10), odd(20), alike(21, FEW), alike(22, FEW), odd(30)], "rank 2"),
        ([alike(10), odd(20), apart(30, waits=True), odd(30)], "rank 2"),
        ([alike(10), odd(20)], "waits"),
        ([alike(10), odd(20), odd(20, whole=FEW)], "waits"),  # of the same step
        ([alike(10), apart(20, waits=True)], "waits"),
        ([alike(10)], ""),
        # Never seen alike, in this epoch and before it.
        ([odd(20), odd(30)], "apart"),
        ([odd(20), alike(30), odd(40)], "apart"),
        # Local SGD, DiLoCo: several go their own way, or all are alike again after a while.
        ([alike(10), apart(20)], "apart"),
        ([alike(10), odd(20), apart(30)], "apart"),
        ([alike(10), odd(20), alike(30)], "apart"),
        ([alike(10), odd(11, whole=FEW), alike(12, FEW)], "waits"),  # of other bytes
        ([alike(10), odd(11, whole=FEW), alike(12, FEW), odd(75, whole=FEW)], "waits"),
        ([alike(10), odd(11, whole=FEW), alike(20)], "apart"),
        # Each time another one: a late save, an evaluation with other weights, on one rank.
        ([alike(10), odd(20), odd(30, rank=1)], "apart"),
        ([alike(10), alike(40), odd(20), odd(50)], "apart"),  # it was heard late, and went away
    ],
)
def test_what_is_seen_of_a_group(seen: list[Outcome], told: str) -> None:
    group, ended = Agreement(), False
    for each in seen:
        ended = ended or group.take(each, 100.0)
    if ended:
        assert told == "apart"
    elif group.confirmed is not None:
        assert told == f"rank {group.confirmed.odd}" and not group.expired(1e9)
    else:
        assert told == ("waits" if group.since else "")
        limit = SETTLE if group.first is None else CONFIRM
        assert not group.expired(99.0 + limit)
        assert group.expired(101.0 + limit) == bool(group.since)


NOW = 9 * RECENT


ONCE = NOW - RECENT - 1


def was(
    rank: int, node: str, *, evicted: bool = False, passed: bool = False, at: float = NOW
) -> OddRank:
    return OddRank(rank, node, 40, evicted, passed, at)


@pytest.mark.parametrize(
    ("before", "held", "peers", "told"),
    [
        ([], (4, 5), ("n1", "n2", "n4"), ("first", ())),
        ([], (4, 5), ("n3", "n1"), ("first", ())),  # a peer on its own node agrees with the others
        ([], (4, 5), ("n3", "n3"), ("first", ())),  # all ranks are there
        ([], (4, 5), ("n1", "n1"), ("unclear", ())),  # one machine against one
        # Its ranks have moved since, and it happens on this node again.
        ([was(2, "n3")], (4, 5), ("n1", "n2"), ("node", ())),
        ([was(2, "n3", passed=True)], (4, 5), ("n1", "n2"), ("node", ())),
        ([was(2, "n1", passed=True), was(2, "n3")], (4, 5), ("n1", "n2"), ("node", ())),
        # It follows the rank: what only rank 0 does, such as an average of its weights.
        ([was(4, "n2")], (4, 5), ("n1", "n2"), ("program", ())),
        ([was(4, "n2", passed=True)], (4, 5), ("n1", "n2"), ("program", ())),
        ([was(4, "n2", evicted=True)], (4, 5), ("n1", "n2"), ("program", ("n2",))),
        # Its ranks could not be moved, or another rank of those that stayed.
        ([was(4, "n3")], (4, 5), ("n1", "n2"), ("unclear", ())),
        ([was(5, "n3")], (4, 5), ("n1", "n2"), ("unclear", ())),
        # On another machine before all were alike again: not two machines at once.
        ([was(2, "n2")], (4, 5), ("n1", "n2"), ("program", ())),
        ([was(2, "n2", evicted=True)], (4, 5), ("n1", "n2"), ("program", ("n2",))),
        ([was(2, "n2", passed=True)], (4, 5), ("n1", "n2"), ("first", ())),
        # A program whose ranks part now and then, each time another one: not three machines a day.
        (
            [was(2, "n2", passed=True), was(3, "n1", passed=True)],
            (4, 5),
            ("n1", "n2"),
            ("program", ()),
        ),
        (
            [was(2, "n2", passed=True), was(3, "n1", passed=True, at=ONCE)],
            (4, 5),
            ("n1", "n2"),
            ("first", ()),
        ),
        # ... and some time it is a node again.
        (
            [was(9, "n3", passed=True), was(2, "n2", passed=True), was(3, "n1", evicted=True)],
            (4, 5),
            ("n1", "n2"),
            ("program", ("n1",)),
        ),
    ],
)
def test_whose_fault_it_is(
    before: list[OddRank],
    held: tuple[int, ...],
    peers: tuple[str, ...],
    told: tuple[str, tuple[str, ...]],
) -> None:
    found = judge(before, 4, "n3", held, peers, NOW)
    assert (found.verdict, found.acquitted) == told
    assert bool(found.why) == (found.verdict != "first")
