"""Replays of a job whose agents are made up: who is named, and what else the job remembers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from made_job import KeptJournal, SentBus, made_launch, made_stalls

from robust_slurm.config import Config
from srun_wrapper.job.facts import JobFacts
from srun_wrapper.job.model import Node, Role
from srun_wrapper.job.state import JobState
from srun_wrapper.job.topology import Topology
from srun_wrapper.orders.machine_tests import MachineResults
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.protocol.messages import (
    Exited,
    Hello,
    Message,
    RankBeat,
    Report,
    Signalled,
    SlotLost,
    Start,
    Stop,
    Stopped,
)
from srun_wrapper.protocol.server import Connection
from srun_wrapper.replay.replaying import Replay
from srun_wrapper.replay.small_worlds import SmallWorlds
from srun_wrapper.supervisor.inbox import Inbox

STEPS = 3


class Job:
    """A job on nodes of one rank each, whose agents obey at once.

    ``behave(group, attempt)``: what the ranks of a small world do, one word: "ok", "nan" (its last
    rank), "crash" (its first rank), "mute", "lost" (its first node), "signal" (sent to all).
    """

    def __init__(
        self, behave: Callable[[tuple[str, ...], int], str], nodes: int = 8, mesh: str = "pp=2,dp=4"
    ) -> None:
        self.behave = behave
        self.config = Config(mesh=mesh, stop_grace=0.0)
        self.state = JobState(self.config, 12, "n0")
        self.inbox = Inbox(self.state)
        self.bus = SentBus(self.state, self._obey)
        self.state.members.lay_out([], [(i,) for i in range(nodes)])
        self.journal = KeptJournal()
        self.starts: list[tuple[Node, Start]] = []
        self.started: dict[tuple[int, str], list[Node]] = {}
        self._numbers = 0
        for i in range(nodes):
            line = cast(Connection, SimpleNamespace(peer=f"10.0.0.{i}", send=lambda _m: None))
            hello = Hello(12, "0", i, f"n{i}", (i,), nodes, nodes, 7000, 7001 + i, 0, 0)
            self.inbox.connected(line, hello)
        self.state.world.places = list(self.state.nodes.values())
        for node in self.state.world.places:
            node.role = Role.ACTIVE
        self.state.new_epoch()
        for node in self.state.world.places:  # they have made steps before
            self.say(node, Report(1, (RankBeat(0, 70, 70, 0.0, source="explicit"),)))
        self.state.members.stopping_epoch = 1

    def _obey(self, node: Node, order: Message) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(order, Start):
            self.starts.append((node, order))
            world = self.started.setdefault((order.epoch, order.env["ROBUST_REPLAY_GROUP"]), [])
            world.append(node)
            if len(world) == int(order.env["WORLD_SIZE"]):
                loop.call_soon(self._run, world, order.epoch)
        elif isinstance(order, Stop):
            self._numbers += 1
            loop.call_soon(self.say, node, Stopped(self._numbers, order.epoch, 9000))

    # what its agents say

    def say(self, node: Node, message: Message) -> None:
        assert node.connection is not None
        self.inbox.message(node.connection, message)

    def _run(self, nodes: list[Node], epoch: int) -> None:
        what = self.behave(tuple(node.name for node in nodes), epoch - 1)
        for node in nodes:
            loss = math.nan if what == "nan" and node is nodes[-1] else 0.5
            self._numbers += 1
            if what == "lost" and node is nodes[0]:
                self.say(node, SlotLost(self._numbers, 0))
            elif what == "signal":
                self.say(node, Signalled(self._numbers, 15))
            elif what == "crash" and node is nodes[0]:
                self.say(node, Exited(self._numbers, epoch, 0, 1, None, 0.0, "boom"))
            elif what != "mute":
                beat = RankBeat(0, STEPS, STEPS, 0.0, source="explicit", loss=loss)
                self.say(node, Report(epoch, (beat,)))

    def replay(self, **settings: Any) -> MachineResults | None:
        self.state.config = replace(self.config, replay=STEPS, **{"replay_limit": 5.0, **settings})

        async def run() -> MachineResults | None:
            state, launch = self.state, made_launch("python", "t.py")
            topology = Topology(state.members, state.config, launch, self.journal, str, dict)
            stopping = Stopping(state, made_stalls(state))
            facts = JobFacts(launch, 12, b"")
            worlds = SmallWorlds(
                state,
                stopping,
                facts,
                self.journal,
                lambda: bool(state.failures) or state.signalled > 0,
            )
            return await Replay(state, worlds, topology).dual_phase()

        return asyncio.run(run())


@pytest.mark.parametrize("how", ["nan", "crash"])
@pytest.mark.parametrize("bad", range(8))
def test_every_position(bad: int, how: str) -> None:
    job = Job(lambda group, _attempt: how if f"n{bad}" in group else "ok")
    found = job.replay()
    assert found is not None and list(found.named) == [f"n{bad}"]
    assert found.named[f"n{bad}"][0].startswith("failed in replay 1 with n")
    assert len(job.journal.named("replay")) == 2
    assert [e["groups"][0]["result"] for e in job.journal.named("replay")].count("bad") <= 2


def test_two_bad_nodes() -> None:
    job = Job(lambda group, _attempt: "crash" if {"n1", "n6"} & set(group) else "ok")
    found = job.replay()
    assert found is not None and sorted(found.named) == ["n1", "n6"]
    assert len(job.journal.named("replay")) == 3


def test_the_job_remembers_nothing_of_it() -> None:
    job = Job(lambda group, _attempt: "nan" if "n3" in group else "ok")
    state = job.state
    before = (state.progress, state.pace, state.nonfinite, state.world.steppers)
    best, beats = state.progress.best, state.progress.beats
    steppers = set(state.world.steppers)
    job.replay()
    assert (state.progress, state.pace, state.nonfinite, state.world.steppers) == before
    assert (state.progress.best, state.progress.beats) == (best, beats) == (70, 70)
    assert state.world.steppers == steppers == set(range(8))
    assert state.failures == [] and state.nonfinite.bound is None
    assert state.stopping_epoch == state.world.epoch == 3
    assert all(node.stopped == 3 for node in state.world.places)


def test_every_group_fails() -> None:
    found = Job(lambda _group, _attempt: "crash").replay()
    assert found is not None and found.named == {}
    assert "every group fails" in found.lines[0] and "exit code 1" in found.lines[0]


def test_no_group_fails() -> None:
    found = Job(lambda _group, _attempt: "ok").replay(replay_rounds=3)
    assert found is not None and found.named == {}
    assert "no group failed in 3 rounds" in found.lines[0]


def test_a_group_that_does_not_end_says_nothing() -> None:
    job = Job(lambda group, _attempt: "mute" if "n3" in group else "ok")
    found = job.replay(replay_limit=0.3)
    assert found is not None and found.named == {}
    (unclear,) = [g for g in job.journal.named("replay")[0]["groups"] if g["result"] != "good"]
    assert unclear == {"nodes": ["n3", "n7"], "result": "unknown",
                       "why": "not finished after 0.3 s"}  # fmt: skip


def test_a_lost_node_is_left_to_the_recovery() -> None:
    job = Job(lambda group, attempt: "lost" if "n2" in group and attempt == 2 else "ok")
    assert job.replay() is None
    (failure,) = job.state.failures
    assert (failure.symptom, failure.node) == ("node_lost", "n2")
    assert job.state.progress.best == 70


def test_the_end_of_the_step() -> None:
    job = Job(lambda _group, _attempt: "signal")
    assert job.replay() is None and job.state.signalled == 15


def test_signals_that_come_meanwhile_wait_for_the_ranks() -> None:
    job = Job(lambda _group, _attempt: job.state.pass_on(10) or "ok")  # type: ignore[func-returns-value]
    assert job.replay() is not None
    assert job.state.early == {10} and not job.state.signalled


@pytest.mark.parametrize(
    ("mesh", "says"),
    [("pp=8", "no dimension"), ("pp=8,dp=1", "one replica"), ("pp=2,dp=8", "has 16 ranks")],
)
def test_what_cannot_be_replayed(mesh: str, says: str) -> None:
    job = Job(lambda _group, _attempt: "ok", mesh=mesh)
    found = job.replay()
    assert found is not None and says in found.lines[0] and not job.starts


def test_losses_that_differ() -> None:
    """No rank fails, but one group computes something else."""
    job = Job(lambda group, _attempt: "ok")
    tell = job.say

    def altered(node: Node, message: Message) -> None:
        if isinstance(message, Report) and message.epoch > 1:
            worlds = [w for (epoch, _), w in job.started.items() if epoch == message.epoch]
            (mates,) = [w for w in worlds if node in w]
            if any(mate.name == "n5" for mate in mates):
                message.beats[0].loss = 0.5000001
        tell(node, message)

    job.say = altered  # type: ignore[method-assign]
    found = job.replay(replay_fixed=True)
    assert found is not None and list(found.named) == ["n5"]
    assert "its loss differs from that of the 3 other groups" in found.named["n5"][0]
