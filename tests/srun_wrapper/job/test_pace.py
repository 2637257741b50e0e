"""The job's own rhythm: limits that fit it, and no false alarms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_job import Job, beat

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.job.pace import (
    FROZEN_ROUNDS,
    FROZEN_TIME,
    START_INSPECT,
    STEP_FACTOR,
    WARM_UP,
    HangVerdict,
    Pace,
    is_frozen,
    is_quiet,
    judge,
)
from srun_wrapper.protocol.messages import Exited, Report, SlotActivity

FLOOR, BUSY, START = 10.0, 600.0, 1800.0
QUIET = SlotActivity(0, "S", 0.0, 0, ("wait (a.py:1)",))
WORKING = SlotActivity(0, "R", 1.0, 0, ("mul (a.py:2)",), True)
SPINNING = SlotActivity(0, "R", 1.0, 0, ("all_reduce (a.py:3)",))
STOPPED = SlotActivity(0, "T", 0.0, 0)


def pace(floor: float = FLOOR, start: float = START) -> Pace:
    new = Pace(floor, BUSY, start)
    new.new_epoch(0.0)
    return new


def stepping(step: float = 1.0, count: int = 10, floor: float = FLOOR) -> tuple[Pace, float]:
    """A pace after ``count`` even steps, and the time of the last."""
    new, now = pace(floor), 0.0
    for _ in range(count):
        now += step
        new.advance(now, 1)
    return new, now


def look(
    p: Pace,
    now: float,
    *samples: SlotActivity,
    rounds: int = 0,
    frozen_for: float = 0.0,
    ending: bool = False,
) -> HangVerdict:
    by_rank = dict(enumerate(samples))
    return judge(p, now, by_rank, 1.0, rounds, frozen_for, ending)


def test_start_up_has_the_start_allowance() -> None:
    p = pace()
    assert p.limit() == p.hard_limit() == START
    assert p.inspect_after() == START_INSPECT
    assert not look(p, START - 1, QUIET, QUIET).hung
    assert look(p, START, WORKING).hung


def test_the_limit_follows_the_slowest_step() -> None:
    p, now = stepping(2.0)
    assert p.limit() == pytest.approx(20.0)
    assert p.step_time() == pytest.approx(2.0)
    p.advance(now + 5.0, 1)
    assert p.limit() == pytest.approx(50.0)


def test_a_rare_slow_step_is_never_forgotten() -> None:
    """Every 5,000th step evaluates, unannounced, and waits quietly for its data: no hang."""
    p, now = stepping(0.01, 100)
    for _ in range(2):
        now += 60.0
        p.advance(now, 1)
        for _ in range(5000):
            now += 0.01
            p.advance(now, 1)
    assert not look(p, now + 60.0, QUIET, QUIET).hung


def test_warm_up_steps_teach_nothing() -> None:
    p = pace()
    for at in (300.0, 400.0, 500.0):  # compilation
        p.advance(at, 1)
    assert p.slowest == 0.0 and p.limit() == START
    p.advance(501.0, 1)
    assert p.limit() == FLOOR


def test_a_first_step_time_above_the_floor_is_no_hang() -> None:
    """After the warm-up, before any step was timed, the floor would be a false alarm."""
    p = pace()
    for i in range(WARM_UP):
        p.advance(30.0 * (i + 1), 1)
    assert not look(p, 30.0 * WARM_UP + 29.0, QUIET, QUIET).hung


def test_rhythm_survives_epochs() -> None:
    p, now = stepping(2.0)
    p.new_epoch(now + 100.0)
    assert p.warming and p.limit() == START
    for i in range(WARM_UP):
        p.advance(now + 110.0 + i, 1)
    assert not p.warming and p.limit() == pytest.approx(20.0)


STEPS = st.floats(0.001, 200.0)


@settings(deadline=None)
@given(
    st.floats(0.1, 100.0),
    st.lists(
        st.tuples(st.sampled_from(["step", "phase", "epoch"]), st.floats(0.0, 500.0)), max_size=40
    ),
)
def test_no_limit_is_below_the_floor(floor: float, history: list[tuple[str, float]]) -> None:
    p, now = pace(floor, start=0.0), 0.0
    for number, (kind, gap) in enumerate(history):
        now += gap
        if kind == "step":
            p.advance(now, 1 + number % 3)
        elif kind == "phase":
            p.in_phase(["", "eval", "save"][number % 3], now, now)
        else:
            p.new_epoch(now)
        assert p.limit() >= floor
        assert p.hard_limit() >= p.limit()
        assert p.inspect_after() <= p.limit()
        assert p.silent(now) >= 0


@settings(deadline=None)
@given(STEPS, st.lists(st.floats(1.0, 9.0), min_size=1, max_size=80), st.integers(1, 5))
def test_jitter_raises_no_alarm(base: float, jitter: list[float], batch: int) -> None:
    """Steps within a factor of nine of each other: even quiet ranks are never called hung."""
    p, now = pace(), 0.0
    for factor in jitter:
        gap = base * factor
        assert not look(p, now + gap * 0.999, QUIET, QUIET).hung
        now += gap
        p.advance(now, batch)
    assert p.limit() <= max(START, STEP_FACTOR * 9.0 * base) * 1.000001


@settings(deadline=None)
@given(STEPS, st.floats(0.1, START - 1.0), st.floats(0.2, 4.9))
def test_phases_raise_no_alarm(step: float, first: float, ratio: float) -> None:
    """The first time within the start allowance, then up to five times as long as before."""
    p, now = stepping(step)
    for took in (first, first * ratio):
        p.in_phase("eval", now, now)
        assert not look(p, now + took * 0.999, QUIET, QUIET).hung
        now += took
        p.in_phase("", 0.0, now)
        assert not look(p, now + min(step, FLOOR) * 0.9, QUIET).hung
        now += step
        p.advance(now, 1)
    assert p.slowest == pytest.approx(step, rel=1e-6)  # a phase is no step


def test_a_known_phase_that_takes_longer_is_only_a_hang_when_quiet() -> None:
    p, now = stepping(0.1)
    p.in_phase("save", now, now)
    p.in_phase("", 0.0, now + 0.2)
    now += 1.0
    p.advance(now, 1)
    p.in_phase("save", now, now)
    assert p.limit() == FLOOR
    assert not look(p, now + 60.0, WORKING, QUIET).hung  # rank 0 writes, the others wait
    assert look(p, now + 60.0, QUIET, QUIET).hung
    assert look(p, now + BUSY, WORKING, QUIET).hung


def test_steps_inside_a_phase_teach_its_rhythm() -> None:
    """``with phase("data")`` in every step: its end is never seen, only the steps are."""
    p, now = stepping(1.0, count=4)
    p.in_phase("data", now, now)
    for _ in range(1000):
        now += 1.0
        p.advance(now, 1)
        p.in_phase("data", now - 0.1, now)
    assert p.limit() == FLOOR
    p.in_phase("", 0.0, now + 0.1)
    assert p.phases["data"] < 2.0


def test_a_wait_for_data_has_the_start_allowance_always() -> None:
    p, now = stepping(1.0)
    for _ in range(2):
        p.in_phase(DATA_WAIT, now, now)
        assert p.limit() == START and p.locate_after() is None
        assert not look(p, now + START - 1.0, QUIET, QUIET).hung
        assert look(p, now + START + 1.0, QUIET, QUIET).hung
        p.in_phase("", 0.0, now + 0.5)
        now += 1.0
        p.advance(now, 1)


def test_a_new_phase_right_after_another() -> None:
    p, now = stepping(1.0)
    p.in_phase("eval", now, now)
    p.in_phase("", 0.0, now + 1.0)
    p.in_phase("eval", now + 2.0, now + 2.0)
    p.in_phase("save", now + 3.0, now + 3.0)
    assert p.limit() == START
    assert p.silent(now + 5.0) == pytest.approx(2.0)


def test_first_steps_of_an_epoch_allow_any_phase() -> None:
    p, now = stepping(1.0)
    p.in_phase("load", now, now)
    p.in_phase("", 0.0, now + 0.1)
    p.new_epoch(now + 10.0)
    p.in_phase("load", now + 11.0, now + 11.0)
    assert p.limit() == START


@pytest.mark.parametrize(
    ("silent", "samples", "rounds", "frozen_for", "hung", "why"),
    [
        (5.0, (QUIET, QUIET), 0, 0.0, False, "within"),
        (10.0, (QUIET, QUIET), 0, 0.0, True, "no rank did anything"),
        (10.0, (QUIET, WORKING), 0, 0.0, False, "busy"),
        (10.0, (STOPPED, WORKING), 0, 0.0, True, "rank 0 is stopped"),
        (9.0, (STOPPED, WORKING), 0, 0.0, False, "within"),
        (599.0, (WORKING, WORKING), 0, 0.0, False, "busy"),
        (600.0, (WORKING, WORKING), 0, 0.0, True, "busy, but no step"),
        (80.0, (SPINNING, SPINNING), FROZEN_ROUNDS, FROZEN_TIME, True, "spin in place"),
        (80.0, (SPINNING, SPINNING), FROZEN_ROUNDS - 1, FROZEN_TIME, False, "busy"),
        (80.0, (SPINNING, SPINNING), FROZEN_ROUNDS, FROZEN_TIME - 1, False, "busy"),
        (10.0, (SlotActivity(0, "D", 0.0, 0), QUIET), 0, 0.0, False, "busy"),
    ],
)
def test_judge(
    silent: float,
    samples: tuple[SlotActivity, ...],
    rounds: int,
    frozen_for: float,
    hung: bool,
    why: str,
) -> None:
    p, now = stepping(0.5)
    verdict = look(p, now + silent, *samples, rounds=rounds, frozen_for=frozen_for)
    assert verdict.hung is hung
    assert why in verdict.why


@pytest.mark.parametrize(
    ("silent", "samples", "rounds", "hung"),
    [
        (20.0, (QUIET, QUIET, WORKING), 0, False),  # a last evaluation on one rank
        (20.0, (QUIET, QUIET), 0, False),
        (START - 1, (QUIET, QUIET), 0, False),
        (BUSY, (WORKING,), 0, False),
        (80.0, (SPINNING, SPINNING), FROZEN_ROUNDS, False),
        (START_INSPECT, (STOPPED, QUIET), 0, True),
        (START, (QUIET, QUIET, WORKING), 0, True),
    ],
)
def test_ranks_that_end_at_different_times_are_no_hang(
    silent: float, samples: tuple[SlotActivity, ...], rounds: int, hung: bool
) -> None:
    p, now = stepping(0.5)
    found = look(p, now + silent, *samples, rounds=rounds, frozen_for=FROZEN_TIME, ending=True)
    assert found.hung is hung
    assert STOPPED in samples or not found.ranks  # those that work at the end do not stand out


def test_when_the_ranks_are_located() -> None:
    """Three slowest steps, two seconds at least; never in start-up or in a phase."""
    p = pace()
    assert p.locate_after() is None
    p, now = stepping(0.5)
    assert p.locate_after() == 2.0
    p.advance(now + 4.0, 1)
    assert p.locate_after() == pytest.approx(12.0)
    p.in_phase("eval", now + 5.0, now + 5.0)
    assert p.locate_after() is None
    p.in_phase("", now + 6.0, now + 6.0)
    p.new_epoch(now + 7.0)
    assert p.locate_after() is None


def test_a_stopped_rank_during_start_up() -> None:
    p = pace()
    assert not look(p, START_INSPECT - 1, STOPPED, WORKING).hung
    verdict = look(p, START_INSPECT, WORKING, STOPPED)
    assert verdict.hung and verdict.ranks == (1,)


@pytest.mark.parametrize(
    ("sample", "quiet"),
    [
        (SlotActivity(0, "S", 0.0, 0), True),
        (SlotActivity(0, "S", 0.06, 60_000), True),
        (SlotActivity(0, "S", 0.5, 0), False),
        (SlotActivity(0, "S", 0.0, 1 << 20), False),
        (SlotActivity(0, "D", 0.0, 0), False),
        (SlotActivity(0, "R", 0.0, 0), False),
        (SlotActivity(0, "S", 0.0, 0, ("f (x:1)",), True), False),
        (SlotActivity(0, "", 0.0, 0), True),
    ],
)
def test_is_quiet(sample: SlotActivity, quiet: bool) -> None:
    assert is_quiet(sample, 1.0) is quiet


def test_is_frozen() -> None:
    assert is_frozen({0: SPINNING, 1: QUIET})
    assert not is_frozen({0: SPINNING, 1: WORKING})
    assert not is_frozen({0: SPINNING, 1: SlotActivity(0, "R", 1.0, 0)})  # no stack: not known
    assert not is_frozen({})


def test_phases_of_several_ranks() -> None:
    job = Job()
    pace = job.state.pace
    job.say(0, Report(1, (beat(0, None, 0, phase="eval", phase_age=1.0),)))
    job.say(1, Report(1, (beat(0, None, 0, phase="save", phase_age=1.0),)))
    assert pace.phase == "eval"
    job.say(0, Report(1, (beat(0, 1, 1),)))
    assert pace.phase == "save" and "eval" in pace.phases
    job.say(1, Report(1, (beat(0, None, 0, phase="upload"),)))
    assert pace.phase == "upload" and "save" in pace.phases
    job.say(1, Exited(1, 1, 0, 0, None, 0.0, ""))  # it ended inside its phase
    job.say(0, Report(1, (beat(0, 2, 2),)))
    assert pace.phase == ""
