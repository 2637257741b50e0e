"""Nodes, places and ranks."""

from __future__ import annotations

import signal

import pytest

from srun_wrapper.job.model import (
    Node,
    Rank,
    Role,
    World,
    first_places,
    planned_world,
    real_world,
)
from srun_wrapper.orders.starting import finish_order
from srun_wrapper.protocol.messages import Hello, RankBeat


def node(index: int, tasks: tuple[int, ...] = (0,), role: Role = Role.ACTIVE) -> Node:
    hello = Hello(12, "0", index, f"n{index}", tasks, 4, 8, 1, 2, 0, 0)
    return Node((12, "0", index), f"n{index}", "10.0.0.1", hello, None, role, 0.0, 2)


def test_real_world_is_as_srun_made_it() -> None:
    nodes = [node(2, (4, 5)), node(0, (0, 1)), node(1, (2, 3))]
    places, ranks = real_world(nodes)
    assert [n.name for n in places] == ["n0", "n1", "n2"]
    assert ranks == [(0, 1), (2, 3), (4, 5)]


def test_planned_world_leaves_the_last_nodes_as_spares() -> None:
    nodes = [node(2), node(0), node(1)]
    places, ranks = planned_world(nodes, ((0, 2), (1, 3)))
    assert [n.name for n in places] == ["n0", "n1"]
    assert ranks == [(0, 2), (1, 3)]


PLANNED = ((0, 1), (2, 3))


def test_the_first_places_go_to_nodes_that_are_still_there() -> None:
    lost = node(1, (2, 3), Role.DEAD)
    late = node(0, (0, 1), Role.TOO_LATE)  # another one came before it
    late.standby_request = 1
    came = node(0, (0, 1), Role.SPARE)
    came.standby_request = 2
    places, ranks = first_places([node(0, (0, 1)), lost, late, came], PLANNED)
    assert places[1] is came and ranks == [(0, 1), (2, 3)]


@pytest.mark.parametrize("planned", [PLANNED, None])
def test_a_place_that_nobody_can_take(planned: tuple[tuple[int, ...], ...] | None) -> None:
    lost = node(1, (2, 3), Role.DEAD)
    with pytest.raises(LookupError, match=r"n1 left before .*: nodes for 1 of 2 places"):
        first_places([node(0, (0, 1)), lost], planned)


def test_a_node_with_fewer_tasks_than_ranks() -> None:
    with pytest.raises(ValueError, match=r"n1 got 1 of the 2 tasks .* --exclusive"):
        first_places([node(0, (0, 1)), node(1, (2,))], PLANNED)


def test_how_every_shim_ends() -> None:
    """A shim ends like its rank; with 0 if it had none."""
    first, spare = node(0, (0, 1, 2)), node(1, (3, 4, 5), Role.SPARE)
    world = World(0, [first], [(0, 1)])
    world.begin(1)
    world.note_exit(world.by_rank[1], 3, 0)
    assert finish_order(world, first).exits == ((0, int(signal.SIGTERM)), (3, 0), (0, 0))
    assert finish_order(world, spare).exits == ((0, 0),) * 3


def test_ranks_stay_where_the_places_are() -> None:
    first, second, spare = node(0), node(1), node(2, role=Role.SPARE)
    world = World(0, [first, second], [(0, 2), (1, 3)])
    assert world.rank_at(first, 0) is None or world.by_rank == {}  # no epoch yet
    world.begin(1)
    rank = world.rank_at(second, 1)
    assert rank is not None and (rank.rank, rank.local, rank.node) == (3, 1, second)
    assert world.rank_at(spare, 0) is None
    world.places[1] = spare
    # Until the next epoch begins nobody holds ranks 1 and 3.
    assert world.rank_at(spare, 0) is None and world.rank_at(second, 0) is None
    world.begin(2)
    taken = world.rank_at(spare, 1)
    assert taken is not None and (taken.rank, taken.node) == (3, spare)
    assert world.size == 4 and sorted(world.by_rank) == [0, 1, 2, 3]


def test_ranks_beyond_the_slots_are_torchruns() -> None:
    only = node(0)
    world = World(0, [only], [(0,)])
    world.begin(1)
    inner = world.rank_at(only, 3)
    assert inner is not None and inner.rank == -1 and inner.started
    assert world.rank_at(only, 3) is inner
    assert len(world.inner) == 1 and len(world.by_rank) == 1
    world.begin(2)
    assert not world.inner


def test_completeness() -> None:
    world = World(0, [node(0)], [(0, 1)])
    world.begin(1)
    one, two = world.by_rank.values()
    assert not (world.all_started() or world.all_exited())
    world.note_started(one)
    world.note_started(one)
    assert not world.all_started()
    world.note_started(two)
    assert world.all_started()
    world.note_exit(one, 0, 0)
    world.note_exit(one, 0, 0)
    assert not world.all_exited()
    world.note_exit(two, 0, 9)
    assert world.all_exited() and two.exit == (0, 9)
    world.begin(2)
    assert not (world.all_started() or world.all_exited())


def test_only_ranks_that_ever_stepped_are_waited_for() -> None:
    world = World(0, [node(0)], [(0, 1, 2)])
    world.begin(1)
    for number in (0, 1):
        rank = world.by_rank[number]
        rank.take(RankBeat(0, 1, 1, 0.0), 1.0)
        world.note_first_step(rank)
    world.begin(2)
    zero, one = world.by_rank[0], world.by_rank[1]
    assert not world.all_stepped()
    zero.take(RankBeat(0, 2, 1, 0.0), 2.0)
    world.note_first_step(zero)
    assert not world.all_stepped()
    world.note_exit(one, 0, 0)
    assert world.all_stepped()


@pytest.mark.parametrize(
    ("beats", "ahead"), [([1], [1]), ([3, 3, 7], [3, 0, 4]), ([5, 2, 4], [5, 0, 2])]
)
def test_take_counts_new_steps(beats: list[int], ahead: list[int]) -> None:
    rank = Rank(0, node(0), 0)
    got = [rank.take(RankBeat(0, n, n, 0.5), 100.0 + n) for n in beats]
    assert got == ahead
    assert rank.last_beat == pytest.approx(99.5 + max(beats))


def test_take_keeps_the_phase() -> None:
    rank = Rank(0, node(0), 0)
    rank.take(RankBeat(0, None, 0, 0.0, "eval", 3.0, "explicit"), 50.0)
    assert (rank.phase, rank.phase_since, rank.last_beat) == ("eval", 47.0, 0.0)
    rank.take(RankBeat(0, 9, 1, 1.0, "", 0.0, "explicit", 0.25, 1.5), 60.0)
    assert (rank.phase, rank.phase_since, rank.step) == ("", 0.0, 9)
    assert (rank.last_beat, rank.loss, rank.grad_norm) == (59.0, 0.25, 1.5)
