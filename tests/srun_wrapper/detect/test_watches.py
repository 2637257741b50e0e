"""Watches: all are called in turns; those of steps only while ranks are expected to make some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from made_job import Job

from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.watches import Watches


def nothing(_job: Job) -> None:
    """Leave the job as it is: its ranks run."""


def fail(job: Job) -> None:
    job.state.failures.append(Failure("crash", 0.0, 0.0, "n0"))


def stop(job: Job) -> None:
    job.state.members.stop_epoch()


@pytest.mark.parametrize(("happens", "stepping"), [(nothing, True), (fail, False), (stop, False)])
def test_watches_of_steps_are_called_while_ranks_run(
    happens: Callable[[Job], None], stepping: bool
) -> None:
    job, called, said = Job(), list[str](), list[str]()
    happens(job)

    def broken(_now: float) -> None:
        called.append("broken")
        raise ValueError("a slip")

    def always(_now: float) -> None:
        called.append("always")
        if called.count("always") == 2:
            job.state.ending = True

    def of_steps(_now: float) -> None:
        called.append("step")

    watches = Watches(job.state, [broken, always], [of_steps], said.append)
    asyncio.run(asyncio.wait_for(watches.run(), 30))
    turn = ["broken", "always", "step"] if stepping else ["broken", "always"]
    assert called == turn * 2
    assert len(said) == 1 and "broken: ValueError: a slip" in said[0], (
        "said once, and hurts no other"
    )


def test_no_watch_is_called_once_the_job_ends() -> None:
    job, called = Job(), list[float]()
    job.state.ending = True
    asyncio.run(Watches(job.state, [called.append], [called.append], lambda _text: None).run())
    assert called == []
