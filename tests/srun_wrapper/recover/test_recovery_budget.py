"""The budget of recoveries over hours, with the real Recovery and a clock that is told the time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import cast

import pytest
from recovering import Recovering

from srun_wrapper.decide.failure import Failure
from srun_wrapper.job import state as job_state
from srun_wrapper.job.model import Node
from srun_wrapper.orders.machine_tests import MachineResults, StopTests
from srun_wrapper.protocol.messages import Message, Stop
from srun_wrapper.recover import recovery, restarted
from srun_wrapper.recover.recovery import STEADY


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("ran", "recovered"),
    [
        ([1.0] * 3, 2),
        ([STEADY - 0.1] * 3, 2),
        ([STEADY] * 9, 9),
        ([1.0, 1.0, STEADY, 1.0, 1.0], 4),
        ([1.0, STEADY, 1.0, STEADY, 1.0, 1.0], 5),
        ([1.0, 1.0, 1.0, STEADY], 2),
    ],
)
def test_only_an_hour_refills_the_budget(
    monkeypatch: pytest.MonkeyPatch, ran: list[float], recovered: int
) -> None:
    """``ran``: seconds that each epoch lasts before a rank dies; the budget is two recoveries."""
    clock = Clock()
    for module in (recovery, job_state):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(restarted, "proving_time", lambda _lived: 0.0)

    async def life() -> int:
        job = Recovering(2)
        for count, seconds in enumerate(ran):
            clock.now += seconds
            crash = Failure("crash", clock.now, clock.now, "n0", 1, signal=9)
            job.state.failures.append(crash)
            if await job.recovery.handle() is not None:
                return count
        return len(ran)

    assert asyncio.run(asyncio.wait_for(life(), 10)) == recovered


@pytest.mark.parametrize(
    ("second", "tested"),
    [
        ((300, None), False),
        ((101, None), True),  # counted from the start of each epoch: taken for the same spot
        ((101, 60), False),  # the saved steps tell
        ((300, 40), True),
    ],
)
def test_a_hang_after_progress_tests_no_machine(
    monkeypatch: pytest.MonkeyPatch, second: tuple[int, int | None], tested: bool
) -> None:
    """``second``: steps, counted, until the second hang, and the newest that was saved.

    The first came after 100 steps, of which 40 were saved where any are.
    """
    monkeypatch.setattr(restarted, "proving_time", lambda _lived: 0.0)
    asked: list[str] = []

    async def ask(_suspects: object, symptom: str) -> MachineResults:
        asked.append(symptom)
        return MachineResults({}, ("1 of 1 nodes passed",), frozenset({"n0"}))

    job = Recovering(9, tests=cast(StopTests, SimpleNamespace(ask=ask)))
    first = (100, None if second[1] is None else 40)

    async def life() -> None:
        for beats, saved in (first, second):
            job.state.progress.beats, job.state.progress.saved = beats, saved
            now = time.monotonic()
            job.state.failures.append(Failure("hang", now, now, "", evidence=("no rank moves",)))
            assert await job.recovery.handle() is None

    asyncio.run(asyncio.wait_for(life(), 10))
    assert asked == ["hang"] * tested


def test_independent_tasks_end_with_their_node() -> None:
    """The tasks are not started again, and an end that is known stays."""
    job = Recovering(2, rank_env=False)
    (node,) = job.state.nodes.values()
    job.state.world.note_exit(job.state.world.by_rank[0], 0, 0)
    job.state.lose_silent(node, "no word for 2 s", shared=False)
    assert asyncio.run(job.recovery.handle()) is None
    assert [r.exit for r in job.state.world.by_rank.values()] == [(0, 0), (0, 9)]
    assert job.state.world.epoch == 1 and job.phase.name == "running"
    assert not job.state.failures and job.state.world.all_exited()
    assert node.gone and node.silent_as is None


def test_ranks_begin_anew_although_the_loss_that_cut_a_recovery_short_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ranks were stopped for a crash; then a silent node was given up, and answers again."""
    monkeypatch.setattr(restarted, "proving_time", lambda _lived: 0.0)
    job = Recovering(2)
    state = job.state

    def also_lost(node: Node, message: Message) -> None:
        job.obey(node, message)
        if isinstance(message, Stop):
            lost = Failure("node_lost", time.monotonic(), 0.0, "n1", evidence=("n1: silent",))
            state.failures.append(lost)

    job.bus.obey = also_lost
    crash = Failure("crash", time.monotonic(), time.monotonic(), "n0", 1, 1, tail="ValueError")
    state.failures.append(crash)

    async def life() -> None:
        assert await job.recovery.handle() is None  # superseded, with the ranks down
        assert state.stopping_epoch == state.world.epoch == 1
        job.bus.obey = job.obey
        state.failures.clear()  # as JobState does when n1 answers again
        assert await job.recovery.handle() is None

    asyncio.run(asyncio.wait_for(life(), 10))
    assert state.world.epoch == 2 and job.phase.name == "running" and not state.failures


def test_the_first_epoch_begins_although_a_node_was_lost_for_a_moment_before_it() -> None:
    job = Recovering(2)
    job.state.world.epoch = 0
    assert asyncio.run(asyncio.wait_for(job.recovery.handle(), 10)) is None
    assert job.state.world.epoch == 1 and job.phase.name == "running"


def test_a_node_that_answers_again_in_a_planned_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch begins; an incident that is long over is not handled again, nor counted."""
    monkeypatch.setattr(restarted, "proving_time", lambda _lived: 0.0)
    job = Recovering(1)
    (node,) = job.state.nodes.values()
    crash = Failure("crash", time.monotonic(), time.monotonic(), "n0", 1, signal=9)
    job.state.failures.append(crash)
    assert asyncio.run(job.recovery.handle()) is None and job.state.world.epoch == 2
    job.incidents.clear()
    job.state.members.stop_epoch()  # the ranks are told to stop, and this node's answer is lost
    assert asyncio.run(job.recovery.handle()) is None
    assert job.state.world.epoch == 3 and job.phase.name == "running" and job.incidents == []
    assert node.stopped == 2  # its ranks are down before others start
