"""Any order of messages, losses and epochs (a state machine)."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from made_job import Job, as_connection, beat

from srun_wrapper.job.model import Role
from srun_wrapper.protocol.messages import Exited, Message, Report, SlotLost, Started, Stopped


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
        self.job.inbox.closed(as_connection(old))

    @rule(index=nodes)
    def closes(self, index: int) -> None:
        self.job.inbox.closed(as_connection(self.job.lines[index]))

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
        """Repeat all from some event on, as after a lost connection: the state stays."""
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
        self.state.members.stop_epoch()

    @precondition(lambda self: len(self.lost) <= 2)
    @rule()
    def recovers(self) -> None:
        """Recover as the supervisor does: spares take the vacant places, a new epoch begins."""
        state = self.state
        state.failures.clear()
        for place, node in enumerate(state.world.places):
            spares = state.spares()
            if node.gone and spares:
                state.world.places[place] = spares[0]
                state.members.move(spares[0], Role.ACTIVE)
        before = state.world.epoch
        assert state.new_epoch() == before + 1
        assert state.failures == []

    @invariant()
    def lost_stays_lost(self) -> None:
        for index in self.lost:
            assert self.job.node(index).role is Role.DEAD
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
