"""Requests that outlast an absence of Slurm."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable

import pytest

from robust_slurm.slurm import SlurmError
from robust_slurm.slurm.errors import Kind
from srun_wrapper.requeue import slurm_wait
from srun_wrapper.requeue.slurm_wait import Outage, SlurmWait, call_waiting

AWAY = SlurmError("unreachable", ("squeue",), "connect failure")


@pytest.mark.parametrize(
    ("kind", "away"),
    [
        ("timeout", True),
        ("unreachable", True),
        ("version", True),
        ("denied", False),
        ("not_found", False),
        ("invalid", False),
        ("conflict", False),
        ("other", False),
    ],
)
def test_away_is_no_refusal(kind: Kind, away: bool) -> None:
    assert SlurmError(kind, (), "").away is away


def test_an_outage_is_reported_at_its_start_once_a_minute_and_at_its_end() -> None:
    outage, now = Outage(900.0), 100.0
    pauses, said = [], []
    while now < 300.0:
        pause, text = outage.failed("requeue the job", AWAY, now, now + 10.0)
        pauses.append(pause)
        said += [text] if text else []
        now += 10.0 + pause
    assert pauses[:5] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert said[0] == (
        "Slurm does not answer (connect failure): waiting up to 15 min to requeue the job"
    )
    assert 3 <= len(said) <= 4
    for text in said[1:]:
        assert re.fullmatch(
            r"Slurm has not answered for \d+ (s|min): still waiting to requeue the job", text
        )
    assert outage.answered(now) == "Slurm answers again after 3 min"
    assert outage.answered(now) == ""
    assert outage.count == 1


def test_an_outage_longer_than_the_limit_is_an_error() -> None:
    outage = Outage(30.0)
    assert outage.failed("x", AWAY, 0.0, 10.0)[0] == 0.5
    assert outage.failed("x", AWAY, 10.5, 29.5)[0] == 0.5  # not past the limit
    with pytest.raises(SlurmError):
        outage.failed("x", AWAY, 20.0, 30.0)


def failing(times: int, error: SlurmError = AWAY) -> Callable[[], str]:
    left = iter([error] * times)

    def request() -> str:
        for err in left:
            raise err
        return "answer"

    return request


def test_it_is_asked_until_slurm_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_wait, "PAUSES", (0.01,))
    said: list[str] = []
    wait = SlurmWait(60.0, lambda: False, said.append)
    assert asyncio.run(wait.call("x", failing(3))) == "answer"
    assert [text.partition(" answer")[0] for text in said] == ["Slurm does not", "Slurm"]
    said.clear()
    assert call_waiting(Outage(60.0), "x", failing(3), said.append) == "answer"
    assert len(said) == 2


def test_a_refusal_is_raised_at_once() -> None:
    said: list[str] = []
    wait = SlurmWait(60.0, lambda: False, said.append)
    refused = SlurmError("conflict", (), "no")
    with pytest.raises(SlurmError, match="no"):
        asyncio.run(wait.call("x", failing(1, refused)))
    with pytest.raises(SlurmError, match="no"):
        call_waiting(Outage(60.0), "x", failing(1, refused), said.append)
    assert not said


def test_nobody_waits_for_a_job_that_ends() -> None:
    """Neither for an answer that takes long nor between two tries; an order is not cut short."""
    began, done = time.monotonic(), []

    def slow() -> None:
        time.sleep(0.5)
        done.append(True)

    wait = SlurmWait(60.0, lambda: time.monotonic() - began > 0.1, lambda _text: None)
    with pytest.raises(SlurmError, match="abandoned"):
        asyncio.run(wait.call("x", slow))
    assert not done
    with pytest.raises(SlurmError, match="connect failure"):
        asyncio.run(wait.call("x", failing(9)))
    asyncio.run(wait.call("x", slow, whole=True))
    assert done
