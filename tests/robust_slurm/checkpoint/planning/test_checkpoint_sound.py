"""The choice of the step to resume from after a loss that was not finite."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_places import SEATS, healthy

from robust_slurm.checkpoint.planning.plan import Holder, plan
from robust_slurm.checkpoint.planning.sound import Bound, Trust, only_sound


def later(places: list[Holder], epoch: int) -> list[Holder]:
    return [p._replace(holdings=[h._replace(epoch=epoch) for h in p.holdings]) for p in places]


DISK = [(4, 4), (6, 4)]


@pytest.mark.parametrize(
    ("steps", "durable", "bound", "expected", "doubt"),
    [
        ((7, 8, 9), [], Bound(8, 1), (8, "memory"), "left out: step 9,"),
        ((7, 8, 9), [(9, 4)], Bound(8, 1), (8, "memory"), "left out: step 9,"),
        ((7, 8, 9), [(8, 4), (9, 4)], Bound(7, 1), (7, "memory"), "left out: step 8-9,"),
        ((7, 8, 9), DISK, Bound(6, 1), (6, "shared"), "left out: step 7-9,"),
        ((7, 8, 9), DISK, Bound(5, 1), (4, "shared"), "left out: step 6-9,"),
        # Nothing is proven: the oldest there is, which a NaN has had the least time to get into.
        ((7, 8, 9), DISK, Bound(3, 1), (4, "shared"), "step 4 may hold a NaN"),
        ((7, 8, 9), [], Bound(3, 1), (7, "memory"), "step 7 may hold a NaN"),
        ((7, 8, 9), [(7, 4)], Bound(3, 1), (7, "memory"), "step 7 may hold a NaN"),
        ((), [(9, 4)], Bound(8, 1), (9, "shared"), "step 9 may hold a NaN"),
        ((), [(9, 4)], Bound(-1, 1), (9, "shared"), "step 9 may hold a NaN"),
        # Never was a loss finite: what memory has is no better than the beginning.
        ((1, 2), [], Bound(-1, 1), (0, ""), "there is no older one"),
        ((), [], Bound(5, 1), (0, ""), ""),
        ((7, 8), [], Bound(8, 1), (8, "memory"), ""),
        # Saved since training began anew.
        ((7, 8, 9), [], Bound(8, 0), (9, "memory"), ""),
        ((7, 8, 9), [(10, 4)], Bound(8, 0), (9, "memory"), "left out: step 10,"),
    ],
)
def test_what_a_nan_may_be_in_is_not_used(
    steps: tuple[int, ...],
    durable: list[tuple[int, int]],
    bound: Bound,
    expected: tuple[int, str],
    doubt: str,
) -> None:
    resume = plan(healthy(*steps), SEATS, 4, durable, before=bound)
    assert (resume.step, resume.tier) == expected
    assert doubt in resume.doubt and bool(doubt) == bool(resume.doubt)
    assert not doubt or resume.lines[1] == resume.doubt


def test_an_incomplete_step_is_no_sound_one() -> None:
    places = healthy(7, 8, 9)
    places[3] = places[3]._replace(holdings=[h for h in places[3].holdings if h.step > 7])
    places[1] = places[1]._replace(holdings=[h for h in places[1].holdings if h.step > 7])
    resume = plan(places, SEATS, 4, before=Bound(7, 1))
    assert (resume.step, resume.tier) == (8, "memory")


STEPS = st.lists(st.integers(1, 9), max_size=3, unique=True)


@given(STEPS, STEPS, st.integers(-1, 10), st.integers(0, 2))
def test_any(steps: list[int], durable: list[int], proven: int, epoch: int) -> None:
    """The step is one that a plan without a bound could have named; a sound one, if any is."""
    bound = Bound(proven, epoch)
    disk = [(step, 4) for step in durable]
    resume = plan(healthy(*steps), SEATS, 4, disk, before=bound)
    good = [s for s in steps if s <= proven or epoch < 1] + [s for s in durable if s <= proven]
    if good:
        assert resume.step == max(good)
    elif resume.tier:
        assert resume.step == min([*(steps if proven > 0 else ()), *durable])
    else:
        assert not durable and (not steps or proven < 1)
    kept = only_sound(healthy(*steps), bound)
    assert {h.step for p in kept for h in p.holdings} == {s for s in steps if s in good}


def test_without_a_bound_all_stay() -> None:
    assert only_sound(healthy(7), None) == healthy(7)
    assert only_sound(later(healthy(7), 2), Bound(3, 1)) == later(healthy(7), 2)


WHY = "a loss was not finite"


@pytest.mark.parametrize(
    ("steps", "durable", "memory", "disk", "doubted", "expected", "said"),
    [
        # The newest certified one, wherever it is.
        ((7, 8, 9), DISK, [8, 7], [6], [], (8, "memory"), "left out: step 9, not certified: a"),
        ((7, 8, 9), DISK, [], [4], [], (4, "shared"), "left out: step 6-9, not certified"),
        ((7, 8, 9), DISK, [], [4, 6], [], (6, "shared"), "left out: step 7-9, not certified"),
        ((), DISK, [], [4], [], (4, "shared"), "left out: step 6, not certified"),
        ((7, 8), DISK, [7, 8], [], [], (8, "memory"), ""),
        # None is certified: the newest sound one.
        ((7, 8, 9), DISK, [], [], [], (8, "memory"), "left out: step 9, as no finite loss"),
        # What an earlier recovery has passed over is not taken, unless all else is lost.
        ((), DISK, [], [], [6], (4, "shared"), ""),
        ((5,), DISK, [], [], [6], (5, "memory"), ""),
        ((), [(6, 4)], [], [], [6], (6, "shared"), ""),
        ((), DISK, [], [6], [6], (4, "shared"), ""),
    ],
)
def test_a_certified_state_is_preferred(
    steps: tuple[int, ...],
    durable: list[tuple[int, int]],
    memory: list[int],
    disk: list[int],
    doubted: list[int],
    expected: tuple[int, str],
    said: str,
) -> None:
    trust = Trust({(step, 1) for step in memory}, disk, doubted, WHY)
    places = healthy(*steps)
    resume = plan(places, SEATS, 4, durable, before=Bound(8, 1), trust=trust)
    assert (resume.step, resume.tier) == expected
    assert said in resume.doubt and bool(said) == bool(resume.doubt)


def test_a_certified_step_counts_only_if_it_is_complete() -> None:
    places = healthy(7, 8)
    places[3] = places[3]._replace(holdings=[h for h in places[3].holdings if h.step != 8])
    places[1] = places[1]._replace(holdings=[h for h in places[1].holdings if h.step != 8])
    resume = plan(places, SEATS, 4, trust=Trust({(7, 1), (8, 1)}, why=WHY))
    assert resume.step == 7


def test_a_node_proven_bad_without_a_certified_step() -> None:
    resume = plan(healthy(7, 8), SEATS, 4, trust=Trust(why="n3 computed wrongly"))
    assert (resume.step, resume.tier) == (8, "memory")
    assert "no step is certified: the newest is used; n3 computed wrongly" in resume.lines


@given(STEPS, STEPS, STEPS, STEPS, STEPS, st.booleans())
def test_any_trust(
    steps: list[int],
    durable: list[int],
    memory: list[int],
    marked: list[int],
    doubted: list[int],
    nan: bool,
) -> None:
    """The newest certified step, if there is any that is not doubted; never nothing for a doubt."""
    trust = Trust({(step, 1) for step in memory}, marked, doubted, WHY)
    disk = [(step, 4) for step in durable]
    before = Bound(5, 1) if nan else None
    resume = plan(healthy(*steps), SEATS, 4, disk, before=before, trust=trust)
    kept = [s for s in durable if s not in doubted] or (durable if not steps else [])
    good = [s for s in steps if s in memory] + [s for s in kept if s in marked]
    if good:
        assert resume.step == max(good)
    elif steps or durable:
        assert resume.tier
