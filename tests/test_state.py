"""How messages change what the supervisor knows."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from robust_slurm.config import Config
from srun_wrapper.messages import (
    Ack,
    Exited,
    Finish,
    Hello,
    Inspected,
    Message,
    RankBeat,
    Report,
    Sample,
    Signalled,
    SlotLost,
    Start,
    Started,
    Stop,
    Stopped,
)
from srun_wrapper.progress import Progress
from srun_wrapper.roster import Node, Role, World, planned_world
from srun_wrapper.server import Connection
from srun_wrapper.state import JobState


class Line:
    """Stands for one connection: keeps what was sent."""

    def __init__(self) -> None:
        self.peer = "10.0.0.1"
        self.agent: object | None = None
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True


def as_connection(line: Line) -> Connection:
    return cast(Connection, line)


def hello(index: int, epoch: int = 0, companion: int = 0) -> Hello:
    job = 12 if not companion else 100 + companion
    return Hello(job, "0", index, f"n{index}", (0, 1), 4, 8, 7000, 7001, companion, epoch)


class Job:
    """A job of ``active`` nodes with two ranks each, and spares."""

    def __init__(self, active: int = 2, spares: int = 1, **config: Any) -> None:
        self.state = JobState(Config(**config), 12, "n0")
        self.lines = [self.join(i) for i in range(active + spares)]
        nodes = list(self.state.nodes.values())
        plan = tuple((2 * i, 2 * i + 1) for i in range(active))
        places, ranks = planned_world(nodes, plan)
        self.state.world = World(0, places, ranks)
        for node in places:
            node.role = Role.ACTIVE
        self.state.new_epoch()

    def join(self, index: int, epoch: int = 0, companion: int = 0) -> Line:
        line = Line()
        self.state.message(as_connection(line), hello(index, epoch, companion))
        return line

    def say(self, index: int, message: Message) -> None:
        self.state.message(as_connection(self.lines[index]), message)

    def node(self, index: int) -> Node:
        return list(self.state.nodes.values())[index]


def test_a_job_comes_together() -> None:
    job = Job()
    assert job.state.step_id == "0"
    assert [n.name for n in job.state.spares()] == ["n2"]
    assert job.lines[0].sent == [Ack(0, 0.5)]
    assert job.state.vacant() == ()
    for i in range(2):
        for local in range(2):
            job.say(i, Started(local + 1, 1, local, 100))
    assert job.state.world.all_started()


def test_a_crash_is_a_failure_once() -> None:
    job = Job()
    crash = Exited(1, 1, 1, None, 9, 0.25, "last words")
    job.say(1, crash)
    job.say(1, crash)
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node, failure.rank) == ("crash", "n1", 3)
    assert (failure.signal, failure.tail) == (9, "last words")
    assert failure.at - failure.last_good == pytest.approx(0.25)
    assert job.lines[1].sent[-1] == Ack(1, 0.5)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (0, Exited(1, 1, 0, 0, None, 0.0, "")),  # a good end
        (0, Exited(1, 0, 0, 1, None, 0.0, "")),  # an older epoch
        (0, Exited(1, 7, 0, 1, None, 0.0, "")),  # an epoch that never was
        (2, Exited(1, 1, 0, 1, None, 0.0, "")),  # a spare
        (0, Exited(1, 1, 9, 1, None, 0.0, "")),  # no such slot
        (2, SlotLost(1, 0)),  # a spare that dies only leaves
        (0, Signalled(1, 15)),
    ],
)
def test_no_failure(index: int, message: Message) -> None:
    job = Job()
    job.say(index, message)
    assert job.state.failures == []


def test_ends_of_our_own_making_are_no_failures() -> None:
    job = Job()
    job.state.stopping_epoch = 1
    job.say(0, Exited(1, 1, 0, None, 15, 0.0, ""))
    assert job.state.failures == []
    assert job.state.world.by_rank[0].exit == (0, 15)


def test_a_lost_shim_is_a_lost_node() -> None:
    job = Job()
    job.say(0, SlotLost(1, 1))
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node) == ("node_lost", "n0")
    assert job.state.vacant() == ("n0",)
    assert job.node(0) not in job.state.live()


def test_losing_twice_is_one_failure() -> None:
    job, news = Job(), list[str]()
    job.state.on_news = news.append
    job.state.lose(job.node(1), "no word")
    job.state.lose(job.node(1), "no word")
    assert len(job.state.failures) == len(news) == 1


def test_a_lost_node_that_comes_back_is_ended() -> None:
    """Cut off, given up, healed: its ranks of an old epoch must not go on."""
    job = Job()
    job.state.lose(job.node(1), "no word")
    line = job.join(1, epoch=1)
    assert job.node(1).role is Role.LOST
    assert Finish(((0, 0), (0, 0))) in line.sent


def start(epoch: int) -> Start:
    return Start(epoch, {}, (), 1.0, 0, True, 2, "n0", 7001)


@pytest.mark.parametrize(
    ("order", "epoch", "stopped", "again"),
    [
        (start(1), 0, 0, True),  # it went under with the connection
        (start(1), 1, 0, False),
        (start(2), 1, 1, True),
        (Stop(1, 1.0), 1, 0, True),
        (Stop(1, 1.0), 1, 1, False),
        (Finish(((0, 0),)), 1, 1, True),
        (None, 0, 0, False),
    ],
)
def test_orders_survive_a_lost_connection(
    order: Message | None, epoch: int, stopped: int, again: bool
) -> None:
    job = Job()
    node = job.node(0)
    node.order, node.stopped = order, stopped
    job.state.closed(as_connection(job.lines[0]))
    line = job.join(0, epoch)
    assert line.sent == [Ack(0, 0.5), *([order] if order is not None and again else [])]


def test_a_new_connection_replaces_the_old() -> None:
    job = Job()
    job.say(0, Started(5, 1, 0, 1))
    old, new = job.lines[0], job.join(0, epoch=1)
    assert old.closed and new.sent[0] == Ack(5, 0.5)
    job.state.closed(as_connection(old))
    assert cast(object, job.node(0).connection) is new
    job.state.closed(as_connection(new))
    assert job.node(0).connection is None and job.node(0).closed_at is not None


def test_strangers_are_cut_off() -> None:
    job, line = Job(), Line()
    job.state.message(as_connection(line), Report(1, ()))
    assert line.closed and line.sent == []
    job.state.closed(as_connection(line))


def test_signals_count_when_all_have_them() -> None:
    job = Job()
    job.say(0, Signalled(1, 15))
    job.say(1, Signalled(1, 15))
    assert job.state.signalled == 0
    job.say(2, Signalled(1, 15))
    assert job.state.signalled == 15


def test_a_released_nodes_signal_is_not_the_jobs() -> None:
    job = Job()
    job.state.lose(job.node(1), "evicted")
    job.say(1, Signalled(1, 15))
    assert job.state.signalled == 0


def beat(local: int, step: int | None, beats: int, **more: Any) -> RankBeat:
    return RankBeat(local, step, beats, 0.0, source=more.pop("source", "explicit"), **more)


def test_progress_by_number() -> None:
    job = Job()
    job.say(0, Report(1, (beat(0, 100, 1), beat(1, 100, 1))))
    job.say(1, Report(1, (beat(0, 101, 2),)))
    progress = job.state.progress
    assert (progress.best, progress.beats, progress.resume) == (101, 2, 100)
    assert progress.numbered and progress.since_failure()
    progress.failed()
    assert job.state.new_epoch() == 2
    job.say(0, Report(1, (beat(0, 500, 9),)))  # of the old epoch
    assert progress.best == 101
    job.say(0, Report(2, (beat(0, 99, 1),)))
    assert progress.resume == 99 and not progress.since_failure()
    job.say(0, Report(2, (beat(0, 102, 4),)))
    assert progress.since_failure()


@pytest.mark.parametrize(
    ("source", "regex", "numbered"),
    [
        ("explicit", "", True),
        ("auto", "", False),
        ("regex", r"step (\d+)", True),
        ("regex", "done with a step", False),  # it counts from 1 wherever training resumed
    ],
)
def test_which_sources_number_steps(source: str, regex: str, numbered: bool) -> None:
    job = Job(progress_regex=regex)
    job.say(0, Report(1, (beat(0, 3, 3, source=source),)))
    assert job.state.progress.numbered is numbered
    assert job.state.progress.best == (3 if numbered else None)


@pytest.mark.parametrize(
    ("before", "now", "progress"),
    [
        (None, 0, False),
        (None, 5, True),
        (100, 0, False),
        (100, 100, False),
        (100, 105, False),
        (100, 120, True),
        (100, 20, True),
        (3, 5, False),
        (0, 3, True),
    ],
)
def test_progress_by_counting(before: int | None, now: int, progress: bool) -> None:
    assert Progress(beats=now, beats_at_failure=before).since_failure() is progress


def test_reports_of_spares_and_lost_nodes_count_nothing() -> None:
    job = Job()
    job.say(2, Report(1, (beat(0, 9, 9),)))
    job.state.lose(job.node(1), "gone")
    job.say(1, Report(1, (beat(0, 9, 9),)))
    assert job.state.progress.beats == 0


def test_phases_of_several_ranks() -> None:
    job = Job()
    pace = job.state.pace
    job.say(0, Report(1, (beat(0, None, 0, phase="eval", phase_age=1.0),)))
    job.say(1, Report(1, (beat(0, None, 0, phase="save", phase_age=1.0),)))
    assert pace.phase == "eval"
    job.say(0, Report(1, (beat(0, 1, 1),)))
    assert pace.phase == "save" and "eval" in pace.phases
    job.say(1, Report(1, (beat(0, None, 0, phase="upload"),)))
    assert pace.phase == "upload" and "save" in pace.phases
    job.say(1, Exited(1, 1, 0, 0, None, 0.0, ""))  # it ended inside its phase
    job.say(0, Report(1, (beat(0, 2, 2),)))
    assert pace.phase == ""


def test_inspections_reach_who_asked() -> None:
    job = Job()
    replies = job.state.inspections[7] = {}
    answer = Inspected(7, 1.0, (Sample(0, "S", 0.0, 0),))
    job.say(0, answer)
    job.say(0, Inspected(8, 1.0, ()))  # nobody waits for that any more
    assert replies == {(12, "0", 0): answer}


def test_named_prefers_the_node_that_is_in_the_job() -> None:
    job = Job()
    job.state.lose(job.node(1), "gone")
    line = Line()
    job.state.awaited.add(1)
    again = hello(1, companion=1)
    job.state.message(as_connection(line), again)
    found = job.state.named("n1")
    assert found is not None and found.companion == 1
    assert job.state.named("nobody") is None


def test_until() -> None:
    job = Job()

    async def check() -> None:
        state = job.state
        assert await state.until(lambda: True, 0.0)
        began = time.monotonic()
        assert not await state.until(lambda: False, 0.05)
        assert time.monotonic() - began < 5.0
        asyncio.get_running_loop().call_later(0.02, job.say, 0, SlotLost(1, 0))
        both = [state.until(lambda: bool(state.failures), 5.0) for _ in range(2)]
        assert await asyncio.gather(*both) == [True, True]

    asyncio.run(check())


class Membership(RuleBasedStateMachine):
    """Any order of messages, losses and epochs. Each agent numbers its events, as real ones do."""

    nodes = st.integers(0, 4)
    epochs = st.integers(-1, 2)  # relative to the present one
    locals_ = st.integers(0, 3)

    @initialize()
    def begin(self) -> None:
        self.job = Job(active=3, spares=2)
        self.state = self.job.state
        self.lost: set[int] = set()
        self.numbers = [0] * 5
        self.history: list[list[Message]] = [[] for _ in range(5)]
        self.ranks = [tuple(r) for r in self.state.world.ranks]
        self.stopped = [0] * 5
        self.exits: dict[tuple[int, int, int], tuple[int, int]] = {}

    def event(self, index: int, kind: type[Any], *fields: Any) -> None:
        self.numbers[index] += 1
        message = kind(self.numbers[index], *fields)
        self.history[index].append(message)
        self.job.say(index, message)

    def epoch(self, relative: int) -> int:
        return self.state.world.epoch + relative

    @rule(index=nodes, relative=epochs)
    def reconnects(self, index: int, relative: int) -> None:
        old = self.job.lines[index]
        self.job.lines[index] = self.job.join(index, self.epoch(relative))
        self.state.closed(as_connection(old))

    @rule(index=nodes)
    def closes(self, index: int) -> None:
        self.state.closed(as_connection(self.job.lines[index]))

    @rule(index=nodes, relative=epochs, local=locals_)
    def started(self, index: int, relative: int, local: int) -> None:
        self.event(index, Started, self.epoch(relative), local, 1)

    @rule(
        index=nodes,
        relative=epochs,
        local=locals_,
        end=st.sampled_from([(0, None), (1, None), (None, 9)]),
    )
    def exited(
        self, index: int, relative: int, local: int, end: tuple[int | None, int | None]
    ) -> None:
        before = len(self.state.failures)
        self.event(index, Exited, self.epoch(relative), local, *end, 0.1, "")
        node = self.job.node(index)
        counts = (
            relative == 0
            and node.role is Role.ACTIVE
            and local < 2
            and end != (0, None)
            and self.epoch(0) > self.state.stopping_epoch
            and self.state.world.rank_at(node, 0) is not None
        )
        assert len(self.state.failures) == before + counts

    @rule(index=nodes, relative=epochs)
    def has_stopped(self, index: int, relative: int) -> None:
        self.stopped[index] = max(self.stopped[index], self.epoch(relative))
        self.event(index, Stopped, self.epoch(relative), 7100)

    @rule(index=nodes)
    def shim_lost(self, index: int) -> None:
        self.event(index, SlotLost, 0)
        self.lost.add(index)

    @rule(index=nodes, relative=epochs, local=locals_, step=st.integers(0, 50))
    def reports(self, index: int, relative: int, local: int, step: int) -> None:
        phase = ["", "eval", "save"][step % 3]
        reported = beat(local, step, step, phase=phase, phase_age=0.1)
        before = self.state.progress.beats
        self.job.say(index, Report(self.epoch(relative), (reported,)))
        if relative != 0 or self.job.node(index).role is not Role.ACTIVE:
            assert self.state.progress.beats == before

    @rule(index=nodes, data=st.data())
    def resends(self, index: int, data: st.DataObject) -> None:
        """Everything from some event on again, as after a lost connection: nothing happens."""
        at = data.draw(st.integers(0, len(self.history[index])))
        failures, world = list(self.state.failures), dict(self.state.world.by_rank)
        ends = {number: rank.exit for number, rank in world.items()}
        for message in self.history[index][at:]:
            self.job.say(index, message)
        assert self.state.failures == failures
        assert {number: rank.exit for number, rank in world.items()} == ends

    @rule(index=nodes)
    def loses(self, index: int) -> None:
        self.state.lose(self.job.node(index), "no word")
        self.lost.add(index)

    @rule()
    def stops(self) -> None:
        self.state.stopping_epoch = self.state.world.epoch

    @precondition(lambda self: len(self.lost) <= 2)
    @rule()
    def recovers(self) -> None:
        """What the supervisor does: spares take the vacant places, a new epoch begins."""
        state = self.state
        state.failures.clear()
        for place, node in enumerate(state.world.places):
            spares = state.spares()
            if node.role is Role.LOST and spares:
                state.world.places[place] = spares[0]
                spares[0].role = Role.ACTIVE
        before = state.world.epoch
        assert state.new_epoch() == before + 1
        assert state.failures == []

    @invariant()
    def lost_stays_lost(self) -> None:
        for index in self.lost:
            assert self.job.node(index).role is Role.LOST
        assert {n.name for n in self.state.live()} == {f"n{i}" for i in set(range(5)) - self.lost}

    @invariant()
    def ranks_keep_their_places(self) -> None:
        world = self.state.world
        assert [tuple(r) for r in world.ranks] == self.ranks
        for place, ranks in enumerate(self.ranks):
            for local, number in enumerate(ranks):
                rank = world.by_rank[number]
                assert (rank.rank, rank.local) == (number, local)
                assert world.places[place].role is not Role.SPARE

    @invariant()
    def nothing_is_forgotten(self) -> None:
        for index in range(5):
            node = self.job.node(index)
            assert node.seen == self.numbers[index]
            assert node.stopped == self.stopped[index]
        assert self.state.pace.limit() >= self.state.config.hang_floor


Membership.TestCase.settings = settings(deadline=None, max_examples=150, stateful_step_count=40)
TestMembership = Membership.TestCase


def test_a_companion_that_comes_too_late_is_sent_away() -> None:
    job = Job()
    line = Line()
    job.state.message(as_connection(line), hello(9, companion=7))
    assert isinstance(line.sent[-1], Finish)
    assert not any(n.companion for n in job.state.live())
