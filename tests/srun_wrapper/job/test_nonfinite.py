"""Losses that are not finite: how they become failures, and what they put in doubt."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import pytest
from made_job import Job, beat

from robust_slurm.checkpoint.planning.sound import Bound
from robust_slurm.record import NotFinite
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.job.nonfinite import NORMS
from srun_wrapper.protocol.messages import RankBeat, Report, decode_from_agent, encode


def lost(local: int, step: int | None, proven: int | None = None, newest: int = 40) -> RankBeat:
    """A beat of a rank whose loss was first not finite at ``step``."""
    return beat(local, newest, newest, loss=nan, nan=NotFinite(step, nan, proven))


def test_a_rank_whose_loss_is_not_finite_is_a_failure_once() -> None:
    job = Job()
    job.say(1, Report(1, (beat(0, 16, 16, loss=2.5), beat(1, 16, 16, loss=2.5))))
    changed = job.state.changed.next
    for _ in range(2):
        job.say(1, Report(1, (lost(1, 17, 16),)))
    (failure,) = job.state.failures
    assert changed.is_set()
    assert (failure.symptom, failure.node, failure.rank, failure.step) == ("nan", "n1", 3, 17)
    assert failure.evidence == ("loss of rank 3 on n1 is nan at step 17",)
    assert failure.last_good < failure.at
    assert job.state.nonfinite.bound == Bound(16, 1)
    assert job.state.progress.best == 17


def test_it_survives_the_wire() -> None:
    sent = Report(1, (lost(0, None, 3), beat(0, 1, 1), lost(1, 5, -1)))
    got = decode_from_agent(encode(sent))
    assert isinstance(got, Report)
    assert [b.nan and (b.nan.step, b.nan.proven) for b in got.beats] == [(None, 3), None, (5, -1)]


def test_several_ranks_before_and_after_the_stop() -> None:
    job = Job()
    state = job.state
    job.say(0, Report(1, (lost(0, 18, 17), lost(1, 18, 17))))
    assert state.nonfinite_open()  # n1 has said nothing yet
    job.say(1, Report(1, (lost(1, 17, 16),)))
    assert not state.nonfinite_open()
    found = diagnose(state.failures, 2)
    assert found.root.node == "n1" and len(found.evidence) == 3
    state.failures.clear()
    state.members.stopping_epoch = 1
    job.say(1, Report(1, (lost(0, 15, 14),)))
    assert not state.failures  # its ranks are being stopped
    assert state.nonfinite.bound == Bound(14, 1) and state.progress.best == 15


def spread(local: int, step: int, sound: int | None) -> RankBeat:
    return beat(local, 40, 40, loss=nan, nan=NotFinite(step, nan, None), sound=sound)


@pytest.mark.parametrize(
    ("others", "open_at_first", "ranks"),
    [
        # Ranks 0 and 1 are on n0, 2 and 3 on n1; rank 3 has a NaN at step 17.
        ([beat(0, 17, 17, loss=2.0), beat(1, 17, 17, loss=2.0)], False, ("rank 3",)),
        ([spread(0, 18, 17), spread(1, 18, 17)], False, ("rank 3",)),
        ([spread(0, 17, 16), spread(1, 17, 16)], False, ()),
        ([beat(0, 16, 16, loss=2.0), beat(1, 17, 17, loss=2.0)], True, ()),  # rank 0 lags
        ([beat(0, 17, 17), beat(1, 17, 17, loss=2.0)], False, ()),  # it reports no loss
        ([beat(0, 17, 17, loss=2.0, healed=True), beat(1, 17, 17, loss=2.0)], False, ()),
        ([spread(0, 18, None), spread(1, 18, 17)], False, ()),
    ],
)
def test_a_nan_that_one_rank_has_first(
    others: list[RankBeat], open_at_first: bool, ranks: tuple[str, ...]
) -> None:
    job = Job()
    state = job.state
    job.say(1, Report(1, (beat(0, 17, 17, loss=2.0), lost(1, 17, 16))))
    assert state.nonfinite_open()
    job.say(0, Report(1, tuple(others)))
    assert state.nonfinite_open() is open_at_first
    found = state.nonfinite.local(state.world.running())
    assert (found.ranks if found else ()) == ranks
    if open_at_first:
        job.say(0, Report(1, (beat(0, 17, 17, loss=2.0), others[1])))
        assert not state.nonfinite_open()
        later = state.nonfinite.local(state.world.running())
        assert later is not None and (later.node, later.ranks) == ("n1", ("rank 3",))
        state.new_epoch()
        assert state.nonfinite.local(state.world.running()) is None


def test_a_rank_that_lags_is_waited_for_only_so_long() -> None:
    job = Job()
    job.say(0, Report(1, (beat(0, 16, 16, loss=2.0), beat(1, 17, 17, loss=2.0))))
    job.say(1, Report(1, (lost(1, 17, 16),)))
    job.say(0, Report(1, (beat(0, 16, 16, loss=2.0), beat(1, 17, 17, loss=2.0))))
    assert job.state.nonfinite_open()
    job.state.nonfinite.since -= 2 * job.state.interval
    assert not job.state.nonfinite_open()


def test_ranks_elsewhere_that_go_on_make_no_progress() -> None:
    """The same spot must not refill the budget each time."""
    job = Job()
    progress = job.state.progress
    for epoch in (1, 2):
        job.say(0, Report(epoch, (beat(0, 99, 40),)))  # a pipeline's first stage has no loss
        job.say(1, Report(epoch, (lost(1, 17, 16),)))
        assert progress.since_failure() is (epoch == 1)
        progress.failed()
        job.say(0, Report(epoch, (beat(0, 120, 61),)))
        assert progress.best == 17
        job.state.new_epoch()


def test_the_bound_lasts_until_training_is_past_it() -> None:
    job = Job()
    state = job.state
    job.say(0, Report(1, (lost(0, 17, 16),)))
    state.new_epoch()
    assert not state.nonfinite.since and state.nonfinite.bound == Bound(16, 1)
    job.say(0, Report(2, (beat(0, 17, 1, loss=2.0),)))
    assert state.nonfinite.bound == Bound(16, 1)
    job.say(0, Report(2, (beat(0, 18, 2, loss=2.0),)))
    assert state.nonfinite.bound is None


def test_a_second_one_goes_further_back_never_forth() -> None:
    job = Job()
    losses = job.state.nonfinite
    for epoch, step, proven, bound in [(1, 17, 16, 16), (2, 16, 15, 15), (3, 17, 16, 15)]:
        job.say(0, Report(epoch, (lost(0, step, proven),)))
        assert losses.bound == Bound(bound, epoch)
        job.state.new_epoch()


@pytest.mark.parametrize(
    ("step", "proven", "bound"),
    [(17, None, Bound(15, 1)), (None, 8, Bound(8, 1)), (None, None, None), (0, -1, Bound(-1, 1))],
)
def test_what_is_known_of_saved_steps(
    step: int | None, proven: int | None, bound: Bound | None
) -> None:
    job = Job()
    job.say(0, Report(1, (lost(0, step, proven),)))
    assert job.state.nonfinite.bound == bound and len(job.state.failures) == 1


def norms(*values: Any) -> list[RankBeat]:
    return [beat(0, 10 + n, n + 1, loss=1.0, grad_norm=v) for n, v in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "failures"),
    [
        ([inf] * (NORMS - 1), 0),
        ([inf] * NORMS, 1),
        ([nan] * (NORMS + 9), 1),
        ([*[inf] * (NORMS - 1), 1.0, *[nan] * (NORMS - 1)], 0),
        ([*[inf] * (NORMS - 1), None, inf], 1),
        ([0.5] * 99, 0),
    ],
)
def test_a_gradient_norm_counts_when_it_stays_so(values: list[Any], failures: int) -> None:
    job = Job()
    for each in norms(*values):
        for _ in range(2):  # the same step twice is one
            job.say(0, Report(1, (each,)))
    assert len(job.state.failures) == failures
    if failures:
        (failure,) = job.state.failures
        assert failure.step == 10 and job.state.nonfinite.bound == Bound(8, 1)
        assert failure.evidence[0].endswith(f"was not finite {NORMS} times, from step 10 on")


def test_ignored_where_that_is_asked_for() -> None:
    job = Job(nan="ignore")
    job.say(0, Report(1, (lost(0, 17, 16),)))
    assert not job.state.failures and job.state.nonfinite.bound is None
    assert job.state.progress.best == 40
