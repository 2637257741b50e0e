"""Changes of the supervisor's knowledge by messages: failures, losses, signals and ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_job import Job, Line, as_connection, beat, hello

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.decide.exclusions import remembered
from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import (
    Ack,
    Exited,
    Finish,
    Message,
    Report,
    Signalled,
    SlotLost,
    Started,
)


def test_a_job_comes_together() -> None:
    job = Job()
    assert job.state.step_id == "0"
    assert [n.name for n in job.state.spares()] == ["n2"]
    assert job.lines[0].sent == [Ack(0, 0.25)]
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
    assert job.lines[1].sent[-1] == Ack(1, 0.25)


@pytest.mark.parametrize(("code", "signum"), [(3, 0), (0, 9), (0, 10)])
def test_an_independent_task_that_fails_has_ended(code: int, signum: int) -> None:
    """A task ended by a signal that was passed on has ended, too: others may handle it."""
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


def test_no_run_of_a_requeued_job_uses_an_incidents_id_again(tmp_path: Path) -> None:
    """A report of the second run had the name of one that the first had withdrawn: it was never
    looked at, and the job could get the bad node again."""
    state, ledger = Job().state, JobLedger(tmp_path)
    (tmp_path / "accusations").mkdir()
    state.step_id = "0"
    first = state.incident_id(1)
    ledger.report_node("n2", first, {"job": 7, "time": 1.0})
    ledger.withdraw("n2", first, 7, "an outage", "transient")
    state.restarts = 1
    ledger.report_node("n2", state.incident_id(1), {"job": 7, "time": 2.0})
    ledger.close()
    assert first == "0-1" and state.incident_id("slow1") == "0r1-slow1"
    assert [bad.node for bad in remembered(tmp_path)] == ["n2"]
