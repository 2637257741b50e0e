"""Recomputed steps: when, where, and what follows (pure)."""

from __future__ import annotations

import pytest

from robust_slurm.checkpoint.format.state_sum import StateSum
from srun_wrapper.checkpoints.verify.rules import (
    Results,
    SeatState,
    compare,
    conclude,
    exchange,
    next_step,
    refused,
    standing,
)
from srun_wrapper.command.input_rules import StdinFeed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""),
        ({"tasks": True}, "independent tasks"),
        ({"checkpoint": False}, "--robust-no-checkpoint"),
        ({"nodes": 1}, "this job has only one node"),
        ({"numbered": True}, "--rdzv-backend=static"),
        ({"source": StdinFeed.OWN}, "each task, a file"),
        ({"source": StdinFeed.ONE}, "one task"),
        ({"source": StdinFeed.FILE}, ""),
    ],
)
def test_where_it_cannot_be_done(change: dict[str, object], why: str) -> None:
    asked = {"tasks": False, "checkpoint": True, "nodes": 2, "numbered": False}
    text = refused(**{**asked, "source": StdinFeed.EVERY, **change})  # type: ignore[arg-type]
    assert why in text and bool(why) == bool(text)


def seats(text: str) -> list[SeatState]:
    """``n1:2/a``: two ranks, in pod a."""
    found = []
    for word in text.split():
        node, _, rest = word.partition(":")
        ranks, _, pod = rest.partition("/")
        found.append(SeatState(node, 2, int(ranks or 0), pod))
    return found


@pytest.mark.parametrize(
    ("places", "spares", "then"),
    [
        ("n1:1 n2:1", "", "n2 n1"),
        ("n1:1 n2:1 n3:1", "", "n2 n3 n1"),
        ("n1:1 n2:1", "n3", "n2 n1"),  # a spare has nothing in memory: only where it must be
        ("n1:1/a n2:1/b n3:1/a n4:1/b", "", "n3 n4 n1 n2"),  # under the same switches as before
        ("n1:1/a n2:1/b n3:1/b", "", "n2 n3 n1"),  # n1 has no partner there
        ("n1:2 n2:2 n3:1", "n4", "n2 n1 n4"),
        ("n1:2 n2:2 n3:1", "", None),
        ("n1:1", "n2", "n2"),
        ("n1:1", "", None),
    ],
)
def test_every_rank_on_another_node(places: str, spares: str, then: str | None) -> None:
    before = seats(places)
    after = exchange(before, seats(spares))
    assert after == (then.split() if then else None)
    for old, new in zip(before, after or (), strict=False):
        assert old.node != new


def test_a_spare_with_too_few_slots_cannot_take_the_ranks() -> None:
    assert exchange([SeatState("n1", 4, 4)], [SeatState("n2", 2, 0)]) is None
    assert exchange([SeatState("n1", 4, 4)], [SeatState("n2", 2, 0), SeatState("n3", 4, 0)]) == [
        "n3"
    ]


@pytest.mark.parametrize(
    ("newest", "ahead", "every", "step"),
    [(0, 5, 100, 100), (94, 5, 100, 100), (95, 5, 100, 100), (96, 5, 100, 200), (7, 5, 1, 12)],
)
def test_the_next_step_that_all_hear_of(newest: int, ahead: int, every: int, step: int) -> None:
    assert next_step(newest, ahead, every) == step


@pytest.mark.parametrize(
    ("saved", "waited", "step_time", "then"),
    [
        ({0: 9, 1: 10}, 1.0, 0.1, "wait"),
        ({0: 10}, 1.0, 0.1, "wait"),  # the other one has said nothing yet
        ({0: 10, 1: 10}, 1.0, 0.1, "all"),
        ({0: 11, 1: 9}, 0.0, 0.1, "over"),  # it had not heard in time
        ({0: 10, 1: 9}, 61.0, 0.1, "over"),
        ({0: 10, 1: 9}, 61.0, 30.0, "wait"),
        ({0: 10, 1: 9}, 61.0, None, "over"),
    ],
)
def test_do_all_stand_at_step_10(
    saved: dict[int, int], waited: float, step_time: float | None, then: str
) -> None:
    assert standing(saved, 2, 10, waited, step_time) == then


def result(*tensors: int, values: int = 7, parts: int = 1, epoch: int = 1) -> Results:
    return {rank: StateSum(rank, epoch, parts, crc, values) for rank, crc in enumerate(tensors)}


@pytest.mark.parametrize(
    ("one", "two", "verdict", "what"),
    [
        (result(1, 2), result(1, 2, epoch=2), "same", ""),
        (result(1, 2), result(1, 3), "differ", "tensors of rank 1"),
        (result(1, 2), result(1, 2, values=8), "differ", "(loader, schedule, extra) of rank 0,1"),
        (result(1, 2), result(1), "unknown", "not all ranks"),
        (result(1), {}, "unknown", "not all ranks"),
        ({}, {}, "unknown", "not all ranks"),
        (result(1, 2), result(1, 2, parts=2), "unknown", "another part"),  # no longer shared
    ],
)
def test_two_results_of_a_step(one: Results, two: Results, verdict: str, what: str) -> None:
    found, text = compare(one, two)
    assert found == verdict and what in text


ONE, TWO, THREE = result(1, 1), result(2, 2), result(3, 3)


@pytest.mark.parametrize(
    ("second", "third", "then"),
    [
        (ONE, None, "agree"),
        (TWO, None, "again"),
        (TWO, ONE, "machine"),
        (TWO, TWO, "once"),  # other nodes and then the first ones agree: the first result was wrong
        (TWO, THREE, "program"),
        (TWO, {}, "unknown"),
        ({}, None, "unknown"),
    ],
)
def test_what_follows(second: Results, third: Results | None, then: str) -> None:
    assert conclude(ONE, second, third) == then
