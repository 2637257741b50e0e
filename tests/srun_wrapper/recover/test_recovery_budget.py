"""The budget of recoveries over hours, with the real Recovery and a clock that is told the time."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_job import KeptJournal, SentBus

from robust_slurm.config import Config
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.checkpoints.registry import Checkpoints
from srun_wrapper.checkpoints.restoring import Restoring
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.ladder import Means
from srun_wrapper.detect.node_watch import NodeWatch
from srun_wrapper.detect.stalls import Stalls
from srun_wrapper.job import state as job_state
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.machine_tests import Found, StopTests
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import Hello, Message, Stop
from srun_wrapper.protocol.server import Connection
from srun_wrapper.recover import recovery, restarted
from srun_wrapper.recover.code_updates import CodeUpdates
from srun_wrapper.recover.localization import FaultLocalization
from srun_wrapper.recover.recovery import STEADY, Recovery, Restoration
from srun_wrapper.recover.restarted import Restarted
from srun_wrapper.recover.settling import Settling


class Clock:
    """Stands for the module ``time``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


async def no_leaves() -> dict[str, str]:
    return {}


class Recovering:
    """The real Recovery of one node with two ranks that obey at once; no node can replace it."""

    def __init__(
        self, max_restarts: int, *, rank_env: bool = True, tests: StopTests | None = None
    ) -> None:
        self.config = Config(
            max_restarts=max_restarts, stop_tests=150 if tests else 0, rank_env=rank_env
        )
        self.state = state = JobState(self.config, 12, "n0")
        hello = Hello(12, "0", 0, "n0", (0, 1), 1, 2, 7000, 7001, 0, 0)
        line = cast(Connection, SimpleNamespace(send=lambda _message: None))
        node = Node((12, "0", 0), "n0", "10.0.0.1", hello, line, Role.ACTIVE, 0.0, 7001)
        state.members.join(node)
        state.members.lay_out([node], [(0, 1)])
        self.phase = Phase()
        self.bus = SentBus(state, self.obey)
        stopping = Stopping(state, self.bus, Stalls(state))
        journal = KeptJournal()
        checkpoints = Checkpoints(state, self.bus, journal, no_leaves)
        certificates, known = checkpoints.certificates, checkpoints.enrolments
        stores = Stores(state, self.bus, known, journal, lambda _node: True)
        restoring = Restoring(state, known, certificates, stores, journal)
        flushing = Flushing(state, known, certificates, stores, never)
        none = no_nodes(max_restarts)
        self.incidents: list[Incident] = []
        self.recovery = Recovery(
            state,
            Settling(state, NodeWatch(state), lambda: None, never),
            FaultLocalization(
                state,
                cast(StopTests, tests),
                cast(Any, None),
                stopping.end_world,
                none.release.evict,
            ),
            none,
            stopping,
            Restoration(restoring, flushing, certificates),
            Restarted(state, self.phase, lambda: None, lambda: 0, never),
            code=CodeUpdates(state, None, cast(Any, None), journal),
            phase=self.phase,
            journal=journal,
            record=self.incidents.append,
            start_epoch=self.begin_epoch,
        )
        self.begin_epoch("")

    def begin_epoch(self, _reason: str) -> None:
        self.state.new_epoch()
        for rank in self.state.world.by_rank.values():
            self.state.world.note_started(rank)

    def obey(self, node: Node, message: Message) -> None:
        if isinstance(message, Stop):
            node.stopped = message.epoch


def never() -> bool:
    return False


def no_nodes(max_restarts: int) -> Any:
    """Stand for NodeParts with nothing to offer: every recovery is a restart in place."""

    async def fill(_incident: Any) -> bool:
        return True

    def nothing(*_any: Any) -> None: ...

    means = SimpleNamespace(now=lambda standby_nodes=0: Means(0, 0, False, max_restarts))
    release = SimpleNamespace(evict=nothing, release=nothing)
    replacement = SimpleNamespace(
        fill=fill, just_joined=lambda: set[str](), exchange=lambda _node: ""
    )
    reports = SimpleNamespace(report_silent=nothing)
    return SimpleNamespace(means=means, release=release, replacement=replacement, reports=reports)


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

    async def ask(_suspects: object, symptom: str) -> Found:
        asked.append(symptom)
        return Found({}, ("1 of 1 nodes passed",), frozenset({"n0"}))

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
    """Nothing is started again, and an end that is known stays."""
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
    """They were stopped for a crash, then a silent node was given up, and it answers again."""
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
