"""Changes of the supervisor's knowledge by messages."""

from __future__ import annotations

import asyncio
import time
from typing import cast

import pytest
from made_job import Job, Line, as_connection, beat, hello

from srun_wrapper.job.model import Role
from srun_wrapper.job.progress import Progress
from srun_wrapper.job.state import PULSE
from srun_wrapper.protocol.messages import (
    Ack,
    Exited,
    Finish,
    Inspected,
    Message,
    Report,
    Sample,
    Signalled,
    SlotLost,
    Start,
    Started,
    Stop,
)


def test_a_job_comes_together() -> None:
    job = Job()
    assert job.state.step_id == "0"
    assert [n.name for n in job.state.spares()] == ["n2"]
    assert job.lines[0].sent == [Ack(0, 0.25, PULSE)]
    assert job.state.vacant() == ()
    for i in range(2):
        for local in range(2):
            job.say(i, Started(local + 1, 1, local, 100))
    assert job.state.world.all_started()


def test_a_crash_is_a_failure_once() -> None:
    job = Job()
    crash = Exited(1, 1, 1, None, 9, 0.25, "last words", facts=("kernel: x",))
    job.say(1, crash)
    job.say(1, crash)
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node, failure.rank) == ("crash", "n1", 3)
    assert (failure.signal, failure.tail) == (9, "last words")
    assert failure.facts == ("kernel: x",)
    assert failure.at - failure.last_good == pytest.approx(0.25)
    assert job.lines[1].sent[-1] == Ack(1, 0.25, PULSE)


@pytest.mark.parametrize(("code", "signum"), [(3, 0), (0, 9), (0, 10)])
def test_an_independent_task_that_fails_has_ended(code: int, signum: int) -> None:
    """Also of a signal that somebody passed on: the others may handle it."""
    job = Job(rank_env=False)
    job.state.pass_on(10)
    job.say(1, Exited(1, 1, 1, code or None, signum or None, 0.25, "last words"))
    assert job.state.failures == [] and not job.state.signalled
    assert job.state.world.by_rank[3].exit == (code, signum)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, Exited(1, 1, 0, 0, None, 0.0, "")),  # a good end
        (0, Exited(1, 0, 0, 1, None, 0.0, "")),  # an older epoch
        (0, Exited(1, 7, 0, 1, None, 0.0, "")),  # an epoch that never was
        (2, Exited(1, 1, 0, 1, None, 0.0, "")),  # a spare
        (0, Exited(1, 1, 9, 1, None, 0.0, "")),  # no such slot
        (2, SlotLost(1, 0)),  # a spare that dies only leaves
        (0, Signalled(1, 15)),
    ],
)
def test_no_failure(index: int, message: Message) -> None:
    job = Job()
    job.say(index, message)
    assert job.state.failures == []


def test_ends_of_our_own_making_are_no_failures() -> None:
    job = Job()
    job.state.members.stopping_epoch = 1
    job.say(0, Exited(1, 1, 0, None, 15, 0.0, ""))
    assert job.state.failures == []
    assert job.state.world.by_rank[0].exit == (0, 15)


def test_a_lost_shim_is_a_lost_node() -> None:
    job = Job()
    job.say(0, SlotLost(1, 1))
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node) == ("node_lost", "n0")
    assert job.state.vacant() == ("n0",)
    assert job.node(0) not in job.state.live()


def test_losing_twice_is_one_failure() -> None:
    job, news = Job(), list[str]()
    job.state.on_news = news.append
    job.state.lose(job.node(1), "no word")
    job.state.lose(job.node(1), "no word")
    assert len(job.state.failures) == len(news) == 1


@pytest.mark.parametrize(
    ("signalled", "silent", "role"),
    [(0, False, Role.DEAD), (15, False, Role.RELEASED), (15, True, Role.DEAD)],
)
def test_a_shim_that_goes_when_the_step_is_ended_is_no_loss(
    signalled: int, silent: bool, role: Role
) -> None:
    job = Job()
    job.state.signalled = signalled
    if silent:
        job.state.lose_silent(job.node(1), "no word", shared=False)
    else:
        job.state.lose(job.node(1), "its robust-task is gone")
    assert job.node(1).role is role


def test_a_lost_node_that_comes_back_is_ended() -> None:
    """Cut off, given up, healed: its ranks of an old epoch must not go on."""
    job = Job()
    job.state.lose(job.node(1), "no word")
    line = job.join(1, epoch=1)
    assert job.node(1).role is Role.DEAD
    assert Finish(((0, 0), (0, 0))) in line.sent


def start(epoch: int) -> Start:
    return Start(epoch, {}, (), 1.0, 0, True, 2, "n0", 7001)


@pytest.mark.parametrize(
    ("order", "epoch", "stopped", "again"),
    [
        (start(1), 0, 0, True),  # it went under with the connection
        (start(1), 1, 0, False),
        (start(2), 1, 1, True),
        (Stop(1, 1.0), 1, 0, True),
        (Stop(1, 1.0), 1, 1, False),
        (Finish(((0, 0),)), 1, 1, True),
        (None, 0, 0, False),
    ],
)
def test_orders_survive_a_lost_connection(
    order: Message | None, epoch: int, stopped: int, again: bool
) -> None:
    job = Job()
    node = job.node(0)
    node.order, node.stopped = order, stopped
    job.inbox.closed(as_connection(job.lines[0]))
    line = job.join(0, epoch)
    assert line.sent == [Ack(0, 0.25, PULSE), *([order] if order is not None and again else [])]


def test_a_new_connection_replaces_the_old() -> None:
    job = Job()
    job.say(0, Started(5, 1, 0, 1))
    old, new = job.lines[0], job.join(0, epoch=1)
    assert old.closed and new.sent[0] == Ack(5, 0.25, PULSE)
    job.inbox.closed(as_connection(old))
    assert cast(object, job.node(0).connection) is new
    job.inbox.closed(as_connection(new))
    assert job.node(0).connection is None and job.node(0).closed_at is not None


def test_strangers_are_cut_off() -> None:
    job, line = Job(), Line()
    job.inbox.message(as_connection(line), Report(1, ()))
    assert line.closed and line.sent == []
    job.inbox.closed(as_connection(line))


def test_signals_count_when_all_have_them() -> None:
    job = Job()
    job.say(0, Signalled(1, 15))
    job.say(1, Signalled(1, 15))
    assert job.state.signalled == 0
    job.say(2, Signalled(1, 15))
    assert job.state.signalled == 15


def test_a_released_nodes_signal_is_not_the_jobs() -> None:
    job = Job()
    job.state.lose(job.node(1), "evicted")
    job.say(1, Signalled(1, 15))
    assert job.state.signalled == 0


def test_a_standby_node_without_ranks_that_slurm_takes_back_is_no_loss() -> None:
    job = Job()
    job.state.awaited.add(7)
    line = job.join(9, standby_request=7)
    (node,) = [n for n in job.state.nodes.values() if n.standby_request]
    job.inbox.message(as_connection(line), Signalled(1, 15))
    assert node.role is Role.RELEASED and any(isinstance(m, Finish) for m in line.sent)
    assert (node.signalled, job.state.signalled, job.state.failures) == (0, 0, [])


def test_progress_by_number() -> None:
    job = Job()
    job.say(0, Report(1, (beat(0, 100, 1), beat(1, 100, 1))))
    job.say(1, Report(1, (beat(0, 101, 2),)))
    progress = job.state.progress
    assert (progress.best, progress.beats, progress.resume) == (101, 2, 100)
    assert progress.numbered and progress.since_failure()
    progress.failed()
    assert job.state.new_epoch() == 2
    job.say(0, Report(1, (beat(0, 500, 9),)))  # of the old epoch
    assert progress.best == 101
    job.say(0, Report(2, (beat(0, 99, 1),)))
    assert progress.resume == 99 and not progress.since_failure()
    job.say(0, Report(2, (beat(0, 102, 4),)))
    assert progress.since_failure()


@pytest.mark.parametrize(
    ("source", "regex", "numbered"),
    [
        ("explicit", "", True),
        ("auto", "", False),
        ("regex", r"step (\d+)", True),
        ("regex", "done with a step", False),  # it counts from 1 wherever training resumed
    ],
)
def test_which_sources_number_steps(source: str, regex: str, numbered: bool) -> None:
    job = Job(progress_regex=regex)
    job.say(0, Report(1, (beat(0, 3, 3, source=source),)))
    assert job.state.progress.numbered is numbered
    assert job.state.progress.best == (3 if numbered else None)


@pytest.mark.parametrize(
    ("before", "now", "progress"),
    [
        (None, 0, False),
        (None, 5, True),
        (100, 0, False),
        (100, 100, False),
        (100, 105, False),
        (100, 120, True),
        (100, 20, True),
        (3, 5, False),
        (0, 3, True),
    ],
)
def test_progress_by_counting(before: int | None, now: int, progress: bool) -> None:
    assert Progress(beats=now, beats_at_failure=before).since_failure() is progress


def test_progress_knows_that_a_step_was_ever_made() -> None:
    progress = Progress()
    progress.new_epoch()
    assert not progress.stepped
    progress.beats = 3
    assert progress.stepped
    for _ in range(2):
        progress.failed()
        progress.new_epoch()
        assert progress.stepped and progress.beats == 0


def test_reports_of_spares_and_lost_nodes_count_nothing() -> None:
    job = Job()
    job.say(2, Report(1, (beat(0, 9, 9),)))
    job.state.lose(job.node(1), "gone")
    job.say(1, Report(1, (beat(0, 9, 9),)))
    assert job.state.progress.beats == 0


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


@pytest.mark.parametrize(
    ("message", "ending"),
    [
        (Exited(1, 1, 0, 0, None, 0.0, ""), True),
        (Exited(1, 1, 0, 1, None, 0.0, ""), False),
        (Exited(1, 1, 0, None, 9, 0.0, ""), False),
        (Report(1, (beat(0, 9, 9), beat(1, 9, 9))), False),
        (Report(1, (beat(0, 9, 9), beat(1, 9, 9, ended=True))), True),
        (Report(1, (beat(7, 9, 9, ended=True),)), True),  # inside a torchrun that still runs
    ],
)
def test_which_ranks_end_the_job(message: Message, ending: bool) -> None:
    job = Job()
    job.say(1, message)
    assert job.state.world.is_ending() is ending
    job.state.new_epoch()
    assert not job.state.world.is_ending()


def test_replies_reach_the_request() -> None:
    job = Job()
    with job.state.bus.ask(Inspected, lambda _token: ()) as asked:
        answer = Inspected(asked.token, 1.0, (Sample(0, "S", 0.0, 0),))
        job.say(0, answer)
        job.say(0, Inspected(asked.token + 1, 1.0, ()))  # nobody waits for that
        assert [(node.key, reply) for node, reply in asked.replies] == [((12, "0", 0), answer)]


def test_named_prefers_the_node_that_is_in_the_job() -> None:
    job = Job()
    job.state.lose(job.node(1), "gone")
    line = Line()
    job.state.awaited.add(1)
    again = hello(1, standby_request=1)
    job.inbox.message(as_connection(line), again)
    found = job.state.named("n1")
    assert found is not None and found.standby_request == 1
    job.state.lose(found, "gone")
    assert job.state.named("n1") is found  # the one that has just left, not the one before
    assert job.state.named("nobody") is None


def test_until() -> None:
    job = Job()

    async def check() -> None:
        state = job.state
        assert await state.until(lambda: True, 0.0)
        began = time.monotonic()
        assert not await state.until(lambda: False, 0.05)
        assert time.monotonic() - began < 5.0
        asyncio.get_running_loop().call_later(0.02, job.say, 0, SlotLost(1, 0))
        both = [state.until(lambda: bool(state.failures), 5.0) for _ in range(2)]
        assert await asyncio.gather(*both) == [True, True]

    asyncio.run(check())


def test_a_waiter_that_begins_takes_no_news_from_another() -> None:
    """On Python 3.11 wait_for starts to wait one turn later; the second waiter cleared the flag."""
    job = Job()

    async def check() -> None:
        state, loop = job.state, asyncio.get_running_loop()
        first = asyncio.create_task(state.until(lambda: bool(state.failures), 5.0))
        loop.call_soon(job.say, 0, SlotLost(1, 0))
        second = asyncio.create_task(state.until(lambda: len(state.failures) > 1, 60.0))
        done, _ = await asyncio.wait([first], timeout=2.0)
        second.cancel()
        assert done, "the first waiter has not heard of the failure"

    asyncio.run(check())


def test_a_standby_node_that_comes_too_late_is_sent_away() -> None:
    job = Job()
    line = Line()
    job.inbox.message(as_connection(line), hello(9, standby_request=7))
    assert isinstance(line.sent[-1], Finish)
    assert not any(n.standby_request for n in job.state.live())


def test_an_impossible_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    node, news = job.node(0), list[str]()
    job.state.on_news = news.append
    job.state.members.move(node, Role.EVICTED)
    with pytest.raises(AssertionError, match="n0 cannot become released"):
        job.state.members.move(node, Role.RELEASED)
    monkeypatch.setattr(job.state.members, "strict", False)
    job.state.members.move(node, Role.SPARE)
    assert node.role is Role.EVICTED
    assert news[1] == "internal error: n0 cannot become spare: it is evicted"


@pytest.mark.parametrize(
    ("beats", "at_failure", "saved", "saved_at_failure", "progress"),
    [
        (100, 100, 580, 500, True),  # as many steps as before, but further on
        (100, 100, 500, 500, False),
        (300, 100, 480, 500, False),  # more steps, and not as far
        (5, None, 5, None, True),
        (0, 100, 580, 500, False),
        (100, 100, None, None, False),
    ],
)
def test_progress_by_saved_steps(
    beats: int,
    at_failure: int | None,
    saved: int | None,
    saved_at_failure: int | None,
    progress: bool,
) -> None:
    now = Progress(beats=beats, beats_at_failure=at_failure, saved=saved)
    now.saved_at_failure = saved_at_failure
    assert now.since_failure() is progress
