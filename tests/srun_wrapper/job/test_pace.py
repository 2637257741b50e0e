"""The job's own rhythm: limits that fit it, and no false alarms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_job import Job, beat

from robust_slurm.layout import DATA_WAIT
from srun_wrapper.job.pace import (
    AGAIN_FACTOR,
    START_INSPECT,
    STEP_FACTOR,
    WARM_UP,
    HangVerdict,
    Pace,
    WorkSigns,
    judge,
    sign_of_work,
)
from srun_wrapper.protocol.looking_messages import WorkCounters
from srun_wrapper.protocol.messages import Exited, Report, SlotActivity

FLOOR, HANG, BUSY, START = 10.0, 300.0, 7200.0, 1800.0
QUIET = SlotActivity(0, "S", 0.0, 0, ("wait (a.py:1)",))
WORKING = SlotActivity(0, "R", 1.0, 0, ("mul (a.py:2)",), True)
SPINNING = SlotActivity(0, "R", 1.0, 0, ("all_reduce (a.py:3)",))
STOPPED = SlotActivity(0, "T", 0.0, 0)
BUSY_IN_C = SlotActivity(0, "R", 1.0, 0)  # no stack: CPU is all that shows


WAITING = SlotActivity(0, "S", 0.0, 0, ("recv (a.py:1)",), used=WorkCounters(0, 0, 0, 0, 2))


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
    p: Pace, now: float, *samples: SlotActivity, ending: bool = False, mismatch: str = ""
) -> HangVerdict:
    """Judge one inspection; what ``samples`` show is all that the watch knows."""
    by_rank, signs = dict(enumerate(samples)), WorkSigns()
    signs.note(now, by_rank, 1.0)
    return judge(p, now, by_rank, 1.0, signs, ending, mismatch=mismatch)


def test_start_up_has_the_start_allowance() -> None:
    p = pace()
    assert p.limit() == p.patience() == START
    assert p.inspect_after() == START_INSPECT
    assert not look(p, START - 1, QUIET, QUIET).hung
    assert look(p, START, QUIET, QUIET).hung
    assert not look(p, START, WORKING).hung
    assert not look(p, 2 * START, WORKING).hung
    assert look(p, BUSY, WORKING).hung


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
        assert p.busy_patience() >= p.patience() >= max(HANG, p.limit())
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
    assert not look(p, now + HANG, WORKING, QUIET).hung  # rank 0 writes, the others wait
    assert look(p, now + HANG, QUIET, QUIET).hung
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
    ("silent", "samples", "hung", "why"),
    [
        (5.0, (QUIET, QUIET), False, "within"),
        (10.0, (QUIET, QUIET), False, "no sign of work for 10 s"),  # a sleep, a lock, a retry
        (299.0, (QUIET, QUIET), False, "no sign of work"),
        (300.0, (QUIET, QUIET), True, "no rank did anything for 300 s"),
        (300.0, (QUIET, WORKING), False, "no sign of work for 0 s"),
        (10.0, (STOPPED, WORKING), True, "rank 0 is stopped"),
        (9.0, (STOPPED, WORKING), False, "within"),
        (7199.0, (WORKING, WORKING), False, ""),
        (7200.0, (WORKING, WORKING), True, "busy, but no step"),
        (80.0, (SPINNING, SPINNING), False, ""),  # one long call in C, or a wait for a GPU
        (300.0, (SPINNING, SPINNING), True, "spin in place"),
        (300.0, (SPINNING, BUSY_IN_C), False, ""),
        (300.0, (SlotActivity(0, "D", 0.0, 0), QUIET), False, ""),
    ],
)
def test_judge(silent: float, samples: tuple[SlotActivity, ...], hung: bool, why: str) -> None:
    p, now = stepping(0.5)
    verdict = look(p, now + silent, *samples)
    assert verdict.hung is hung
    assert why in verdict.why


def test_different_collectives_are_certain() -> None:
    p, now = stepping(0.5)
    line = "rank 1 calls broadcast, ranks 0,2 call all_reduce"
    assert not look(p, now + 9.0, QUIET, mismatch=line).hung
    assert look(p, now + 10.0, WORKING, QUIET, mismatch=line).why.endswith(line)


def test_a_wait_that_the_job_has_got_over_is_never_a_hang_again() -> None:
    p, now = stepping(0.5)
    now += 290.0
    p.advance(now, 1)
    assert p.patience() == pytest.approx(STEP_FACTOR * 290.0)
    p.new_epoch(now)
    for _ in range(WARM_UP):
        now += 0.5
        p.advance(now, 1)
    assert not look(p, now + 2000.0, QUIET, QUIET).hung


def test_the_same_stall_again_has_four_times_the_patience_each_time() -> None:
    p, now = stepping(0.5)
    for again in range(1, 5):
        p.again = again
        patience = HANG * AGAIN_FACTOR**again
        assert p.patience() == patience
        assert not look(p, now + patience - 1, QUIET, QUIET).hung
        assert look(p, now + 30.0, STOPPED, QUIET).hung
        p.stopped_again = True
        assert not look(p, now + patience - 1, STOPPED, QUIET).hung  # it stops itself, each time
        p.stopped_again = False
        assert look(p, now + patience, QUIET, QUIET).hung
        assert p.busy_patience() == BUSY * AGAIN_FACTOR**again


@pytest.mark.parametrize(
    ("silent", "samples", "hung"),
    [
        (20.0, (QUIET, QUIET, WORKING), False),  # a last evaluation on one rank
        (20.0, (QUIET, QUIET), False),
        (86400.0, (QUIET, QUIET), False),
        (86400.0, (WORKING,), False),
        (300.0, (SPINNING, SPINNING), False),
        (START_INSPECT, (STOPPED, QUIET), True),
    ],
)
def test_ranks_that_end_at_different_times_are_no_hang(
    silent: float, samples: tuple[SlotActivity, ...], hung: bool
) -> None:
    p, now = stepping(0.5)
    found = look(p, now + silent, *samples, ending=True)
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
    ("sample", "sign"),
    [
        (SlotActivity(0, "S", 0.0, 0), ""),
        (SlotActivity(0, "S", 0.06, 6_000), ""),
        (SlotActivity(0, "S", 0.5, 0), "uses the CPU"),
        (SlotActivity(0, "S", 0.5, 0, ("f (x:1)",)), ""),  # a wait for a GPU spins
        (SlotActivity(0, "S", 0.0, 1 << 20), "reads or writes"),
        (SlotActivity(0, "D", 0.0, 0), "waits for a device or a file (state D)"),
        (SlotActivity(0, "S", 0.0, 0, ("f (x:1)",), True), "moves through its program"),
        (SlotActivity(0, "", 0.0, 0), ""),
    ],
)
def test_signs_of_one_inspection(sample: SlotActivity, sign: str) -> None:
    assert sign_of_work(sample, 1.0) == sign


@pytest.mark.parametrize(
    ("cpu", "io", "sockets", "faults", "processes", "sign"),
    [
        (0.0, 0, 0, 0, 7, ""),
        (0.1, 20_000, 20_000, 20, 7, ""),  # log lines, pings, a watchdog's thread
        (0.0, 64 << 10, 0, 0, 7, "reads or writes"),  # 64 KiB, once between two inspections
        (0.0, 0, 64 << 10, 0, 7, "sends or receives"),
        (0.0, 0, 0, 100, 7, "maps memory or files"),
        (0.0, 0, 0, 0, 8, "starts or ends processes"),
        (1.0, 0, 0, 0, 7, "computes"),  # a rank without a GPU, or a child
        (0.0, 0, -1 << 40, 0, 7, ""),  # the kernel did not tell
    ],
)
def test_signs_between_two_inspections(
    cpu: float, io: int, sockets: int, faults: int, processes: int, sign: str
) -> None:
    before = WorkCounters(10.0, 1000, 1000, 1000, 7)
    after = WorkCounters(10.0 + cpu, 1000 + io, 1000 + sockets, 1000 + faults, processes)
    quiet = SlotActivity(0, "S", 0.0, 0, ("f (x:1)",), used=after)
    assert sign_of_work(quiet, 1.0, before, 5.0) == sign


def test_a_rank_that_writes_a_little_every_few_seconds_is_at_work() -> None:
    """64 KiB every 3 s: no inspection of 1 s may see it, the counters do."""
    p, now = stepping(0.5)
    signs, written = WorkSigns(), 0
    verdicts = []
    for at in range(10, 1500, 5):
        written += 100_000
        saving = SlotActivity(
            0, "S", 0.0, 0, ("write (a.py:1)",), used=WorkCounters(0, written, 0, 0, 1)
        )
        waiting = SlotActivity(0, "S", 0.0, 0, ("recv (a.py:1)",), used=WorkCounters(0, 0, 0, 0, 2))
        samples = {0: saving, 1: waiting}
        signs.note(now + at, samples, 1.0)
        verdicts.append(judge(p, now + at, samples, 1.0, signs))
    assert not any(verdict.hung for verdict in verdicts)
    assert set(signs.at) == {0}
    for at in range(1500, 1795, 5):
        signs.note(now + at, samples, 1.0)  # it has stopped to write
        verdicts.append(judge(p, now + at, samples, 1.0, signs))
    assert verdicts[-1].hung == (HANG <= 1790 - 1495)
    signs.note(now + 1796, samples, 1.0)
    assert "no rank did anything for 301 s" in judge(p, now + 1796, samples, 1.0, signs).why


def test_counters_are_not_compared_with_those_from_before_our_own_reading() -> None:
    signs = WorkSigns()
    for at, faults in ((0.0, 0), (5.0, 1000)):
        sample = SlotActivity(0, "S", 0.0, 0, ("f (x:1)",), used=WorkCounters(0, 0, 0, faults, 1))
        signs.note(at, {0: sample}, 1.0)
        signs.forget_counters()
    assert signs.last() == float("-inf")


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
