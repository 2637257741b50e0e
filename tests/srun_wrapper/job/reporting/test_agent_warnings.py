"""Warnings of robust-tasks, of one rank's stream or of those of all ranks."""

from __future__ import annotations

import logging
from math import inf

import pytest
from made_job import Job

from srun_wrapper.job.reporting.agent_warnings import COUNT_AFTER, AgentWarnings
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
    assert said[1:] == [f"warning: 9600 streams of ranks on 1200 nodes: {LOST}"]
    assert caplog.messages == []


def test_few_are_counted_again_when_they_are_many() -> None:
    said: list[str] = []
    warnings = AgentWarnings(said.append)
    for rank in range(100):
        warnings.heard(float(rank), "n1", lost(rank))
        warnings.look(float(rank))
    assert [line.split()[1] for line in said] == ["n1:", "6", "60"]
    warnings.heard(100.0, "n2", lost(7, "no steps are read from it any more: it is gone"))
    warnings.look(inf)
    assert [line.split()[1] for line in said[3:]] == ["n2:"], "one only: nothing to count"


def test_other_lines_are_only_logged_and_what_a_robust_task_left_out_is_too(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    with caplog.at_level(logging.WARNING, "robust-srun.agent"):
        job.say(0, Logged(1, logging.WARNING, "no data process"))
        job.say(0, Logged(2, logging.WARNING, f"stdout of rank 0: {LOST}", 3, LOST))
    logged = [r.getMessage() for r in caplog.records if r.name == "robust-srun.agent"]
    assert logged[0] == "n0: no data process" and "(3 more messages" in logged[1]
    assert len(logged) == 2
