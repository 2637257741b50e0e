"""Steps that all ranks write to the durable tier: one after the other, the same on all."""

from __future__ import annotations

import math
import random

import pytest

from srun_wrapper.checkpoints.durable_steps import GIVEN_UP, DurableSteps

AHEAD = 5


def asked(steps: DurableSteps, newest: int, now: float = 0.0, *, timed: bool = True) -> int | None:
    return steps.next(now, newest, AHEAD, timed=timed)


def by_step(every: int) -> DurableSteps:
    steps = DurableSteps(math.inf)
    steps.every = every
    return steps


def test_the_next_step_is_asked_for_when_the_one_before_is_over() -> None:
    steps = by_step(10)
    assert asked(steps, 9) is None  # the ranks take step 10 by themselves
    assert asked(steps, 300) is None  # which is still being written
    steps.over(10)
    assert asked(steps, 300, timed=False) is None  # how far ahead is not known yet
    assert asked(steps, 301) == 310
    assert asked(steps, 302) is None
    steps.over(310)
    assert asked(steps, 311) == 320  # none is left out where writing is quick
    steps.over(310)  # said again, as by a flush
    assert asked(steps, 320) is None


@pytest.mark.parametrize(("resumed", "first"), [(0, 10), (7, 10), (10, 20), (13, 20)])
def test_the_first_step_after_a_resume_is_the_next_multiple(resumed: int, first: int) -> None:
    steps = by_step(10)
    steps.resumed(resumed)
    assert asked(steps, first) is None
    steps.over(first - 1)  # another one
    assert asked(steps, first) is None
    steps.over(first)
    assert asked(steps, first) == first + 10


def test_after_a_recovery_from_memory_the_ranks_write_at_once() -> None:
    steps = by_step(10)
    steps.over(10)
    steps.begin(at_once=True)
    steps.resumed(33)
    assert asked(steps, 34) is None
    steps.over(34)
    assert asked(steps, 35) == 40


def test_a_step_that_every_rank_has_written_is_over_without_a_commit() -> None:
    """No store commits if there is only the nodes' own disk."""
    steps = by_step(10)
    for _ in range(3):
        steps.written(10, 4)
        assert asked(steps, 12) is None
    steps.written(10, 4)
    assert asked(steps, 12) == 20


def test_a_step_that_nobody_reports_on_is_given_up() -> None:
    steps = by_step(10)
    assert asked(steps, 10) is None
    assert asked(steps, 11, now=5.0) is None
    assert asked(steps, 500, now=5.0 + GIVEN_UP) is None
    assert asked(steps, 501, now=6.0 + GIVEN_UP) == 510


def test_steps_that_a_restart_would_lose() -> None:
    steps = by_step(10)
    assert not steps.is_open(before=10) and steps.is_open(before=11)
    steps.over(10)
    assert not steps.is_open(before=99)
    assert asked(steps, 20) == 30 and steps.is_open(before=40) and not steps.is_open(before=30)


def test_by_time_and_by_step_do_not_meet() -> None:
    steps = DurableSteps(600.0)
    steps.every = 100
    assert asked(steps, 1, now=1.0) is None
    assert asked(steps, 95, now=602.0) is None  # step 100 comes soon, and does as well
    steps.over(100)
    assert asked(steps, 101, now=603.0) == 106
    assert asked(steps, 104, now=604.0) is None
    steps.over(106)
    assert asked(steps, 107, now=605.0) == 200
    assert asked(steps, 150, now=1206.0) == 155
    assert asked(steps, 151, now=1207.0) is None  # 200 and 155 are under way


def test_without_either_nothing_is_asked_for() -> None:
    steps = DurableSteps(math.inf)
    steps.over(5)
    assert [asked(steps, newest, now=newest * 1e6) for newest in range(1, 9)] == [None] * 8


@pytest.mark.parametrize("seed", range(20))
def test_no_rank_is_asked_while_another_writes(seed: int) -> None:
    """With any times of writing, steps asked for by ``every`` never overlap and none is lost."""
    chance = random.Random(seed)
    steps = by_step(chance.choice([1, 3, 10]))
    ranks = 5
    busy: dict[int, list[int]] = {}  # step → when each rank has written it, in steps of training
    wanted = {steps.every}
    for newest in range(1, 400):
        if newest in wanted:
            assert not busy, (newest, busy)
            busy[newest] = [newest + chance.randrange(1, 40) for _ in range(ranks)]
        for step, ends in list(busy.items()):
            for _ in range(ends.count(newest)):
                steps.written(step, ranks)
            if newest >= max(ends):
                del busy[step]
        following = asked(steps, newest)
        if following is not None:
            assert following >= newest + AHEAD and following % steps.every == 0
            wanted.add(following)
    assert len([step for step in wanted if step < 340]) >= 400 // (40 + AHEAD + steps.every) - 1
