"""The start of a program: when it is over, and for how long further failures are awaited."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from recovering import Recovering, never

from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.job.state import JobState
from srun_wrapper.recover import settling
from srun_wrapper.recover.settling import AT_WORK, SETTLE_START, START_MAX, Settling, at_start

NOW = 5000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "time", SimpleNamespace(monotonic=lambda: NOW))


def job(epoch: int = 1, lived: float = 20.0, beats: int = 0) -> JobState:
    state = Recovering(2).state
    for _ in range(epoch - 1):
        state.new_epoch()
    state.pace.epoch_since, state.progress.beats = NOW - lived, beats
    return state


@pytest.mark.parametrize(
    ("state", "is_so"),
    [
        ({}, True),
        ({"lived": AT_WORK + 1}, False),
        ({"epoch": 2}, False),  # the first one may have made steps that are not seen
        ({"beats": 1}, False),
    ],
)
def test_only_the_first_minutes_of_the_first_epoch_are_the_start(
    state: dict[str, int], is_so: bool
) -> None:
    assert at_start(job(**state)) is is_so


@pytest.mark.parametrize(
    ("ago", "tail", "state", "waits"),
    [
        ([1.0], "ValueError: x", {}, True),
        ([9.0, 1.0], "ValueError: x", {}, True),
        ([SETTLE_START], "ValueError: x", {}, False),
        ([START_MAX, 1.0], "ValueError: x", {}, False),
        ([1.0], "OSError: [Errno 98] Address already in use", {}, False),
        ([1.0], "ValueError: x", {"epoch": 2}, False),
        ([1.0], "ValueError: x", {"lived": AT_WORK}, False),
    ],
)
def test_how_long_others_may_fail_likewise(
    ago: list[float], tail: str, state: dict[str, int], waits: bool
) -> None:
    made = job(**state)
    made.failures.extend(
        Failure("crash", NOW - s, NOW - s, "n0", rank, 1, tail=tail) for rank, s in enumerate(ago)
    )
    found = Settling(made, NodeWatch(made), lambda: None, never)._at_start()
    assert found is waits
