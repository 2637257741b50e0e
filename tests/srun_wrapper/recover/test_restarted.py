"""The restarts that count as recoveries, and their known costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from made_job import Job, beat

from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import RECOVERED, Incident
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import Account
from srun_wrapper.protocol.messages import Exited, Report, Started
from srun_wrapper.recover import restarted
from srun_wrapper.recover.lost_work import LostWork
from srun_wrapper.recover.restarted import LIVED, LIVED_MOST, Restarted, proving_time


class Restart:
    """A job of one node with two ranks in its second epoch, all ranks started."""

    def __init__(self, steps: int = 0, source: str = "explicit", restored: int | None = None):
        """``steps``: that each rank made before; ``restored``: what the ranks are given."""
        self.job = job = Job(active=1)
        self.phase = Phase()
        self.phase.name = "recovering"
        self.resumed_in = 0
        self.restarted = Restarted(
            job.state, self.phase, lambda: restored, lambda: self.resumed_in, lambda: False
        )
        self.source = source
        if steps:
            self.steps(1, steps, steps)
        crash = Failure("crash", 1.0, 0.9, "n0", 0, signal=9)
        self.incident = Incident("0-1", 1, diagnose([crash]), 0.9, 1.0)
        progress = job.state.progress
        self.incident.step_before = progress.best if progress.numbered else progress.saved
        progress.failed()
        job.state.new_epoch()
        for local in range(2):
            job.say(0, Started(local + 1, 2, local, 100))

    def steps(self, epoch: int, step: int, beats: int) -> None:
        beats_of = (beat(local, step, beats, source=self.source) for local in range(2))
        self.job.say(0, Report(epoch, tuple(beats_of)))

    def run(self, *then: Callable[[], Any], lived: float = 0.0) -> bool | None:
        """Return whether it is a recovery after each of these was called; None: not decided yet."""

        async def wait() -> bool | None:
            task = asyncio.create_task(self.restarted.prove(self.incident, lived))
            for call in then:
                await asyncio.sleep(0)
                assert not task.done()
                call()
            done, _ = await asyncio.wait([task], timeout=0.2)
            task.cancel()
            return task.result() == "recovered" if done else None

        return asyncio.run(wait())

    def crash(self) -> None:
        self.job.say(0, Exited(9, 2, 1, None, 9, 0.0, ""))


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(restarted, "say", lines.append)
    return lines


def test_without_a_step_it_is_no_recovery() -> None:
    restart = Restart(steps=5)
    assert restart.run() is None
    assert Restart(steps=5).run(restart.crash) is None
    failed = Restart(steps=5)
    assert failed.run(failed.crash) is False
    stepped = Restart(steps=5)
    assert stepped.run(lambda: stepped.steps(2, 4, 1)) is True
    assert stepped.incident.lost_steps == 2 and stepped.phase.name == "recovering"


def test_ranks_without_steps_must_live(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    waiting = Restart()
    assert waiting.run() is None and waiting.phase.name == "starting"
    failed = Restart()
    assert failed.run(failed.crash) is False
    monkeypatch.setattr(restarted, "LIVED", 0.05)
    lived = Restart()
    assert lived.run() is True and lived.incident.lost_steps is None
    assert "first_step" not in lived.incident.phases()  # the time of the proof costs nothing
    line = lived.incident.line()
    assert "first step not seen" in line and "lost time unknown" in line
    assert len(said) == 1 and "--robust-progress-regex" in said[0] and "beat(step)" in said[0]


def test_ranks_without_steps_that_end_well_have_recovered() -> None:
    restart = Restart()
    ends = [Exited(8 + local, 2, local, 0, None, 0.0, "") for local in range(2)]
    assert restart.run(*(lambda end=end: restart.job.say(0, end) for end in ends)) is True


def test_first_steps_after_a_restart_have_cost_none() -> None:
    restart = Restart()
    assert restart.run(lambda: restart.steps(2, 1, 1)) is True
    assert restart.incident.lost_steps == 0


@pytest.mark.parametrize(
    ("lived", "seconds"),
    [(0.0, LIVED), (LIVED, LIVED), (60.0, 60.0), (86400.0, LIVED_MOST)],
)
def test_how_long_they_must_live(lived: float, seconds: float) -> None:
    assert proving_time(lived) == seconds


@pytest.mark.parametrize(
    ("source", "saved", "restored", "told", "step", "lost"),
    [
        ("explicit", None, None, False, 1, 580),  # nothing was resumed
        ("explicit", 580, 579, True, 580, 1),
        ("explicit", 580, 579, False, 1, 580),  # given, but the script started anew
        ("explicit", 580, 500, True, 510, 80),  # it reports every tenth step only
        ("auto", None, None, False, 1, None),  # counted steps: not known, which is not 0
        ("auto", 580, 579, True, 1, 1),
        ("auto", 580, 579, False, 1, None),
    ],
)
def test_lost_steps_are_what_was_seen(
    source: str,
    saved: int | None,
    restored: int | None,
    told: bool,
    step: int,
    lost: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarted, "RESUMED", 0.01)
    restart = Restart(580, source, restored)
    if source == "auto":
        restart.incident.step_before = saved
    restart.resumed_in = 2 if told else 1
    assert restart.run(lambda: restart.steps(2, step, 1)) is True
    assert restart.incident.lost_steps == lost
    restart.incident.outcome = RECOVERED
    line = restart.incident.line()
    assert ("lost steps unknown" in line) is (lost is None)
    account = Account()
    account.first_step = account.started
    account.incident(restart.incident, 0.5)
    assert account.lost_steps == lost
    assert (account.unproductive(account.started, 0.5) is None) is (lost is None)


def test_steps_that_begin_anew_are_warned_of_once(said: list[str]) -> None:
    restart = Restart(580)
    assert restart.run(lambda: restart.steps(2, 1, 1)) is True
    (line,) = said
    assert "the steps began anew at 1 after the restart, although step 580 had been reac" in line
    restart.restarted._advise()
    assert len(said) == 1


@pytest.mark.parametrize(
    ("source", "made", "restored", "step"),
    [
        ("explicit", 580, None, 571),  # it resumed
        ("explicit", 580, 0, 1),  # a Checkpointer has given it its state
        ("explicit", 1, None, 1),  # there was nothing to resume
        ("auto", 580, None, 1),  # steps are counted: not known
    ],
)
def test_nothing_is_warned_of_that_is_not_known(
    source: str,
    made: int,
    restored: int | None,
    step: int,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarted, "RESUMED", 0.01)
    restart = Restart(made, source, restored)
    assert restart.run(lambda: restart.steps(2, step, 1)) is True
    assert said == []


def test_an_optimizer_that_begins_anew_has_lost_all_steps(said: list[str]) -> None:
    restart = Restart(580, "auto")

    def anew() -> None:
        restart.source = "anew"
        restart.steps(2, 1, 1)

    restart.restarted._lost_work = LostWork(restart.job.state, ())
    assert restart.run(anew) is True
    assert "the optimizer counts its steps from 1 again" in said[0]
    assert restart.incident.lost_steps == 580 and restart.incident.estimate


def test_a_failed_restart_leaves_the_account_open() -> None:
    restart = Restart(580)
    account = Account()
    restart.incident.outcome = "superseded by another failure"
    account.incident(restart.incident, None)
    assert account.lost_steps == 0
