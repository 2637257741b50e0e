"""Dual-phase replay: groups, and who is named by what fails in them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from itertools import combinations, count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.active.coordinator import replay
from health.active.coordinator.replay import Layout, ReplayLayoutError, ReplayVerdict, Round

pytestmark = pytest.mark.slow

Fires = Callable[[], bool]


def always() -> bool:
    return True


def rounds_of(
    layout: Layout, faulty: Collection[int], quiet: int = 2, fires: Fires = always
) -> tuple[list[Round], str]:
    """Replay until it is over; a group fails if ``fires`` for one of its faulty machines."""
    rounds: list[Round] = []
    while not (why := replay.over(layout, rounds, quiet)):
        groups = replay.next_groups(layout, rounds)
        check(layout, groups)
        hit = {x for x in faulty if fires()}
        bad = (number for number, group in enumerate(groups) if hit & set(group))
        rounds.append(Round(groups, frozenset(bad)))
    return rounds, why


def check(layout: Layout, groups: tuple[replay.Group, ...]) -> None:
    """Every group is a whole small job, nobody is in two, and each keeps its stage."""
    members = [x for group in groups for x in group]
    assert len(members) == len(set(members)) and set(members) <= set(range(layout.nodes))
    for group in groups:
        assert len(group) == layout.m
        assert [x % layout.unit for x in group] == [i % layout.unit for i in range(layout.m)]


@st.composite
def layouts(draw: st.DrawFn, most: int = 12, least_groups: int = 2) -> Layout:
    unit = draw(st.integers(1, 9))
    k = draw(st.integers(1, 3))
    n = draw(st.integers(least_groups, max(least_groups, most)))
    return Layout(unit, k * n + draw(st.integers(0, k - 1)), k)


@pytest.mark.parametrize(
    ("nodes", "unit", "m", "n", "phases"),
    [
        (8, 2, 2, 4, 2),  # pp=2, dp=4
        (24, 4, 4, 6, 2),  # figure 6 of the paper
        (8, 1, 2, 4, 2),  # data parallelism alone: pairs, so that links are used
        (9, 1, 2, 4, 2),  # one sits out
        (2, 1, 1, 2, 1),
        (16, 8, 8, 2, 4),  # PP > DP: 1 + log2(8)
        (30, 6, 6, 5, 3),
        (1200, 8, 8, 150, 2),  # 9,600 GPUs
    ],
)
def test_layouts(nodes: int, unit: int, m: int, n: int, phases: int) -> None:
    found = replay.layout(nodes, unit)
    assert (found.m, found.n, found.phases, found.nodes) == (m, n, phases, nodes)


@pytest.mark.parametrize(
    ("nodes", "unit", "text"),
    [
        (4, 4, "one replica"),
        (6, 4, "cannot be divided into whole replicas"),
        (0, 1, "cannot be divided into whole replicas"),
        (4, 0, "cannot be divided into whole replicas"),
    ],
)
def test_what_cannot_be_replayed(nodes: int, unit: int, text: str) -> None:
    with pytest.raises(ReplayLayoutError, match=text):
        replay.layout(nodes, unit)


def test_the_papers_example() -> None:
    """Figure 6: m = 4, n = 6, machine 13."""
    layout = replay.layout(24, 4)
    horizontal, diagonal = replay.groups(layout, 0), replay.groups(layout, 1)
    assert horizontal[3] == (12, 13, 14, 15)
    (other,) = [group for group in diagonal if 13 in group]
    assert set(horizontal[3]) & set(other) == {13}


@given(layouts())
def test_phases_tell_all_machines_apart(layout: Layout) -> None:
    """The paper's property: a machine is the only one in the groups that it is in."""
    phases = [replay.groups(layout, phase) for phase in range(layout.phases)]
    for groups in phases:
        check(layout, groups)
        assert sum(map(len, groups)) == layout.m * layout.n
    ways: dict[int, list[int]] = {x: [] for x in range(layout.m * layout.n)}
    for groups in phases:
        for number, group in enumerate(groups):
            for x in group:
                ways[x].append(number)
    assert len(set(map(tuple, ways.values()))) == len(ways)
    if layout.m <= layout.n:
        for one in phases[0]:
            for other in phases[-1]:
                assert layout.m == 1 or len(set(one) & set(other)) <= 1


@given(layouts(), st.data())
def test_one_bad_machine_is_named(layout: Layout, data: st.DataObject) -> None:
    faulty = data.draw(st.integers(0, layout.nodes - 1))
    rounds, why = rounds_of(layout, {faulty})
    assert replay.verdict(layout, rounds)[:2] == ((faulty,), ()), why
    sat_out_first = faulty >= layout.m * layout.n
    assert sat_out_first or len(rounds) <= max(2, layout.phases)


@pytest.mark.parametrize(("nodes", "unit"), [(8, 2), (24, 4), (16, 8), (9, 1), (96, 8)])
def test_every_position(nodes: int, unit: int) -> None:
    layout = replay.layout(nodes, unit)
    for faulty in range(nodes):
        rounds, _ = rounds_of(layout, {faulty})
        assert replay.verdict(layout, rounds).named == (faulty,)


@pytest.mark.parametrize(("bad", "most"), [(2, 3), (3, 4)])
def test_every_pair_and_triple(bad: int, most: int) -> None:
    layout = replay.layout(24, 4)
    for faulty in combinations(range(24), bad):
        rounds, why = rounds_of(layout, faulty)
        assert replay.verdict(layout, rounds)[:2] == (faulty, ()), (faulty, why)
        assert len(rounds) <= most, faulty


@given(st.data(), st.integers(2, 3))
def test_several_bad_machines_are_named(data: st.DataObject, bad: int) -> None:
    """In one round more than there are of them, if groups are not larger than many."""
    layout = data.draw(layouts(16, least_groups=6))
    if layout.m > layout.n:
        return
    whole = st.integers(0, layout.m * layout.n - 1)
    faulty = tuple(sorted(data.draw(st.sets(whole, min_size=bad, max_size=bad))))
    rounds, why = rounds_of(layout, faulty)
    assert replay.verdict(layout, rounds)[:2] == (faulty, ()), why
    assert len(rounds) <= bad + 1


@given(layouts(), st.floats(0.05, 1.0), st.integers(1, 6), st.integers(0, 2**32), st.data())
def test_of_one_bad_machine_no_other_is_blamed(
    layout: Layout, p: float, quiet: int, seed: int, data: st.DataObject
) -> None:
    chance = random.Random(seed)
    faulty = data.draw(st.integers(0, layout.nodes - 1))
    rounds, _ = rounds_of(layout, {faulty}, quiet, lambda: chance.random() < p)
    assert set(replay.verdict(layout, rounds).named) <= {faulty}


def test_nothing_fails() -> None:
    layout = replay.layout(8, 2)
    rounds, why = rounds_of(layout, (), quiet=3)
    assert why == "no group failed in 3 rounds"
    assert replay.verdict(layout, rounds) == ReplayVerdict((), (), ())


def test_every_group_fails() -> None:
    layout = replay.layout(8, 2)
    rounds, why = rounds_of(layout, range(8))
    assert len(rounds) == 1 and why.startswith("every group fails")
    assert replay.verdict(layout, rounds).named == ()


def test_no_group_ends() -> None:
    layout = replay.layout(8, 2)
    rounds = [Round(replay.groups(layout, 0), frozenset(), frozenset(range(4)))]
    assert replay.over(layout, rounds, 2) == "no group finished in time"
    assert replay.verdict(layout, rounds) == ReplayVerdict((), (), tuple(range(8)))


def test_what_is_not_known_proves_nothing() -> None:
    """Machine 0 shows only in its first replay, and its second has no result."""
    layout = replay.layout(8, 2)
    first = Round(replay.groups(layout, 0), frozenset({0}))
    groups = replay.next_groups(layout, [first])
    unclear = frozenset(number for number, group in enumerate(groups) if 0 in group)
    found = replay.verdict(layout, [first, Round(groups, frozenset(), unclear)])
    assert (found.named, found.undecided) == ((), (0,))


def test_named_machines_sit_out() -> None:
    layout = replay.layout(8, 2)
    rounds, _ = rounds_of(layout, {3})
    groups = replay.next_groups(layout, rounds)
    check(layout, groups)
    assert len(groups) == 3 and all(3 not in group for group in groups)


def test_a_failure_that_never_comes_again_names_nobody() -> None:
    """A port that was taken, say."""
    layout = replay.layout(24, 4)
    turns = count()
    rounds, why = rounds_of(layout, {5}, quiet=2, fires=lambda: next(turns) == 0)
    assert why == "no group failed in 2 rounds" and len(rounds) == 3
    assert replay.verdict(layout, rounds)[:2] == ((), (4, 5, 6, 7))


# -- faults that do not show every time


def test_least_chance() -> None:
    assert replay.least_chance(1) == pytest.approx(0.95)
    assert replay.least_chance(29) < 0.1 < replay.least_chance(28)


def missed(layout: Layout, p: float, quiet: int, runs: int = 400) -> float:
    """Share of runs in which the one bad machine is not named."""
    chance = random.Random(f"{p} {quiet}")
    named = 0
    for _ in range(runs):
        faulty = chance.randrange(layout.nodes)
        rounds, _ = rounds_of(layout, {faulty}, quiet, lambda: chance.random() < p)
        named += replay.verdict(layout, rounds).named == (faulty,)
    return 1 - named / runs


@pytest.mark.parametrize(("p", "most"), [(0.5, 0.13), (0.8, 0.06)])
def test_two_that_show_by_chance(p: float, most: float) -> None:
    """A healthy machine is named as well in few of the runs."""
    layout, chance, runs, wrong = replay.layout(24, 4), random.Random(2), 300, 0
    for _ in range(runs):
        faulty = set(chance.sample(range(24), 2))
        rounds, _ = rounds_of(layout, faulty, 5, lambda: chance.random() < p)
        wrong += not set(replay.verdict(layout, rounds).named) <= faulty
    assert wrong / runs < most


@pytest.mark.parametrize("p", [0.1, 0.3, 0.5])
def test_what_repeats_buy(p: float) -> None:
    """A bad machine must show twice: two times 95 %, and never worse than a little above 10 %."""
    layout = replay.layout(24, 4)
    enough = next(n for n in count(1) if replay.least_chance(n) <= p)
    assert missed(layout, p, enough) < 0.14
    assert missed(layout, p, 2) > missed(layout, p, enough)
