"""Warnings of robust-tasks, of one rank's stream or of those of all ranks."""

from __future__ import annotations

import logging
from math import inf

import pytest
from made_job import Job

from srun_wrapper.job.reporting.agent_warnings import COUNT_AFTER, FORGET, AgentWarnings
from srun_wrapper.protocol.messages import Logged

LOST = "further output is lost, training goes on: No space left on device"


def lost(rank: int, trouble: str = LOST) -> Logged:
    return Logged(1, logging.WARNING, f"stdout of rank {rank}: {trouble}", 0, trouble)


def test_output_that_all_ranks_lose_is_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for _epoch in range(3):
        for rank in range(9600):
            warnings.heard(100.0, f"n{rank // 8}", lost(rank))
        warnings.look(101.0)
    assert said == [f"warning: n0: stdout of rank 0: {LOST}"]
    for now in (100 + COUNT_AFTER, 200.0, inf):
        warnings.look(now)
    assert said[1:] == [f"warning: 9600 streams of ranks on 1200 nodes (n[0-1199]): {LOST}"]
    assert caplog.messages == []


def test_they_are_counted_when_no_more_come_and_again_when_there_are_more() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for rank in (0, *range(1, 961), *range(961, 9600)):
        now = 3600.0 * (rank > 0) + 60.0 * (rank > 960)
        if rank in (1, 961):  # the first stream is alone for an hour: 5 s are long over
            warnings.look(now)
        warnings.heard(now, f"n{rank // 8}", lost(rank))
        warnings.look(now + 1.0)
    warnings.look(inf)
    assert said[:2] == [f"warning: n0: {lost(0).text}", f"warning: n0: {lost(1).text}"]
    assert [line.split(": ")[1] for line in said[2:]] == [
        "960 streams of ranks on 121 nodes (n[0-120])",
        "9599 streams of ranks on 1200 nodes (n[0-1199])",
    ]
    warnings.heard(100.0, "n2", lost(7, "no steps are read from it any more: it is gone"))
    warnings.look(inf)
    assert [line.split()[1] for line in said[4:]] == ["n2:"], "one only: nothing to count"


def test_streams_that_are_lost_one_by_one_are_counted_once_a_minute() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for rank in range(60):
        warnings.heard(10.0 * rank, "n1", lost(rank))
        warnings.look(10.0 * rank + COUNT_AFTER)
    warnings.look(inf)
    assert len(said) == 1 + 10 + 1
    assert said[-1] == f"warning: 60 streams of ranks on 1 node (n1): {LOST}"


def test_streams_that_are_lost_without_a_pause_are_counted_before_the_end() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for rank in range(60):
        warnings.heard(3.0 * rank, "n1", lost(rank))
        warnings.look(3.0 * rank + 1.0)
    assert [line.split()[1] for line in said[1:]] == ["22", "43"], "once a minute"


def test_a_loss_after_output_was_written_again_is_a_new_one() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for day in (0.0, 86400.0):
        for restart in range(3):  # a rank repeats it, on whichever node it is
            for rank, node in enumerate(("n1", f"n{2 + restart}")):
                warnings.heard(day + 300.0 * restart, node, lost(rank))
            warnings.look(day + 300.0 * restart + COUNT_AFTER)
        warnings.look(day + FORGET + 600.0)
    first = [
        f"warning: n1: {lost(0).text}",
        f"warning: 2 streams of ranks on 2 nodes (n[1-2]): {LOST}",
    ]
    assert said == 2 * first


def test_a_rank_that_moved_is_on_one_node() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for rank, node in ((0, "n1"), (1, "n1"), (1, "n2"), (0, "n2")):
        warnings.heard(100.0, node, lost(rank))
    warnings.look(inf)
    assert said[1:] == [f"warning: 2 streams of ranks on 1 node (n2): {LOST}"]


def test_other_lines_are_only_logged_and_what_a_robust_task_left_out_is_too(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    with caplog.at_level(logging.WARNING, "robust-srun.agent"):
        job.say(0, Logged(1, logging.WARNING, "no data process"))
        job.say(0, Logged(2, logging.WARNING, "no data process", 3))
    logged = [r.getMessage() for r in caplog.records if r.name == "robust-srun.agent"]
    assert logged[0] == "n0: no data process" and "(3 more messages" in logged[1]
    assert len(logged) == 2 and "no data process" not in capfd.readouterr().err
