"""A step that is being ended while some of its nodes are silent."""

from __future__ import annotations

import signal

import pytest
from made_job import Job

from srun_wrapper.protocol.messages import Exited, Signalled
from srun_wrapper.supervisor.step.ending import Ending

TERM = int(signal.SIGTERM)


def ended(job: Job, index: int) -> None:
    for local in (0, 1):
        job.say(index, Exited(local + 2, 1, local, None, TERM, 0.0, ""))


@pytest.mark.parametrize(
    ("told", "silent", "signalled"),
    [
        ([0, 1, 2], [], TERM),
        ([0, 1], [], 0),  # the news of the third may be on its way
        ([0, 1], [2], TERM),  # it cannot say so
        ([0], [1, 2], TERM),
        ([0], [2], 0),
        ([], [2], 0),
        ([], [0, 1, 2], 0),
    ],
)
def test_a_signal_counts_when_all_that_answer_have_it(
    told: list[int], silent: list[int], signalled: int
) -> None:
    job = Job(3, 0)
    ending = Ending(job.state, lambda node, _now: node in [job.node(i) for i in silent])
    for index in told:
        job.say(index, Signalled(1, TERM))
    ending.look(0.0)
    assert job.state.signalled == signalled


@pytest.mark.parametrize(
    ("done", "silent", "over"),
    [([0, 1], [], True), ([0], [], False), ([0], [1], True), ([], [1], False), ([], [0, 1], True)],
)
def test_it_is_over_when_no_rank_runs_where_somebody_answers(
    done: list[int], silent: list[int], over: bool
) -> None:
    job = Job(2, 0)
    job.state.signalled = TERM
    ending = Ending(job.state, lambda node, _now: node in [job.node(i) for i in silent])
    for index in done:
        ended(job, index)
    ending.look(0.0)
    assert ending.over is over
    assert [ending.answers(job.node(i)) for i in (0, 1)] == [i not in silent for i in (0, 1)]


def test_it_is_over_when_the_rest_is_lost() -> None:
    job = Job(2, 0)
    job.state.signalled = TERM
    ending = Ending(job.state, lambda _node, _now: False)
    ended(job, 0)
    job.state.lose(job.node(1), "gone")
    ending.look(0.0)
    assert ending.over


def test_silent_nodes_are_no_end_by_themselves() -> None:
    job = Job(2, 0)
    ending = Ending(job.state, lambda _node, _now: True)
    ending.look(0.0)
    assert not ending.over and not ending.silent and not job.state.signalled
