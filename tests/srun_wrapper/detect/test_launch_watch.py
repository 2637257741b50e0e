"""Nodes that do not start their ranks: one is at fault, several wait for what they share."""

from __future__ import annotations

import time

import pytest
from made_job import Job

from robust_slurm.config import Config
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.detect.launch_watch import LaunchWatch, judge
from srun_wrapper.protocol.messages import Exited, Started

LAUNCH = Config().launch_limit


@pytest.mark.parametrize(
    ("late", "nodes", "waited", "verdict"),
    [
        (0, 4, 900.0, "wait"),
        (1, 4, LAUNCH - 1, "wait"),
        (1, 4, LAUNCH, "lose"),
        (2, 4, LAUNCH, "tell"),
        (4, 4, 599.0, "tell"),
        (4, 4, 600.0, "lose"),
        (1, 1, LAUNCH, "tell"),  # of one node nobody knows what the others would do
        (1, 2, LAUNCH, "lose"),
    ],
)
def test_which_nodes_are_lost(late: int, nodes: int, waited: float, verdict: str) -> None:
    assert judge(late, nodes, waited, LAUNCH, 600.0) == verdict


def looked(job: Job, *waited: float) -> list[str]:
    said: list[str] = []
    watch = LaunchWatch(job.state, said.append)
    now = time.monotonic()
    for seconds in waited:
        job.state.pace.epoch_since = now - seconds
        watch.look(now)
    return said


def starts(job: Job, *nodes: int) -> None:
    for node in nodes:
        for local in range(2):
            job.say(node, Started(local + 1, 1, local, 100))


def test_one_node_that_lags_in_the_first_epoch_is_lost() -> None:
    job = Job(active=3)
    starts(job, 0, 2)
    assert looked(job, LAUNCH - 1, LAUNCH) == []
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node) == ("node_lost", "n1")
    assert failure.shared and not diagnose([failure]).suspects  # late is no evidence of a fault
    assert failure.evidence == ("n1: did not start its ranks in 300 s",)


def test_several_that_lag_are_told_once_and_waited_for() -> None:
    job = Job(active=3, stall_limit=1000.0)
    starts(job, 0)
    (line,) = looked(job, LAUNCH, LAUNCH + 1, 999.0)
    assert line.startswith("2 (n1, n2) of 3 nodes have not started their ranks after 300 s")
    assert not job.state.failures
    looked(job, 1000.0)
    assert [f.node for f in job.state.failures] == ["n1", "n2"]
    assert not diagnose(job.state.failures).suspects  # replaced, but nothing is held against them


def test_the_clock_stands_while_a_file_system_does_not_answer() -> None:
    job, stalled = Job(), [True]
    starts(job, 0)
    watch = LaunchWatch(job.state, lambda _text: None, lambda: stalled[0])
    now = job.state.pace.epoch_since
    watch.look(now + 2 * LAUNCH)
    stalled[0] = False
    watch.look(now + 3 * LAUNCH - 1)
    assert not job.state.failures
    watch.look(now + 3 * LAUNCH)
    assert [f.node for f in job.state.failures] == ["n1"]


def test_a_rank_that_ended_at_once_has_been_started() -> None:
    job = Job()
    starts(job, 0)
    job.say(1, Exited(1, 1, 0, 0, None, 0.0, ""))
    job.say(1, Exited(2, 1, 1, 0, None, 0.0, ""))
    assert looked(job, LAUNCH) == [] and not job.state.failures
