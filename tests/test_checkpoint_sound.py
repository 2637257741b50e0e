"""What to resume from after a loss that was not finite."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_places import SEATS, healthy

from robust_slurm.checkpoint.plan import Place, plan
from robust_slurm.checkpoint.sound import Bound, only_sound


def later(places: list[Place], epoch: int) -> list[Place]:
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
    """It is a step that a plan without a bound could have named; a sound one, if there is any."""
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
