"""Receive all messages of the node agents, and change the job's state accordingly."""

from __future__ import annotations

import logging
import re
import signal
import time

from srun_wrapper.decide import counters
from srun_wrapper.decide.failure import Failure
from srun_wrapper.job.model import Node, Rank, Role
from srun_wrapper.job.reporting import job_log
from srun_wrapper.job.reporting.agent_warnings import AgentWarnings
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import ENDING, JobState
from srun_wrapper.protocol.messages import (
    Ack,
    Counted,
    Exited,
    Finish,
    Hello,
    Imports,
    Logged,
    Message,
    NumberedMessage,
    Reply,
    Report,
    Signal,
    Signalled,
    SlotLost,
    Stalled,
    Start,
    Started,
    StdinRead,
    Stopped,
    WarmRanks,
    Warmup,
    WorkerEnded,
    Wrote,
)
from srun_wrapper.protocol.server import Connection

_log = logging.getLogger("robust-srun.nodes")


class Inbox:
    """Takes the agents' messages; ``state.changed`` is set after each that somebody waits for."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.warnings = AgentWarnings(say)
        self._warmup: Warmup | None = None  # what the command imports
        self._rank_warmup: Warmup | None = None  # if it is a launcher: what its ranks do
        # Sources whose step numbers count from 1 in every process, wherever it resumed.
        groups = re.compile(state.config.progress_regex.encode()).groups
        self._counting = ("auto", "anew") if groups else ("auto", "anew", "regex")

    # -- messages

    def connected(self, connection: Connection, hello: Hello) -> Node:
        state = self._state
        key = (hello.job_id, hello.step_id, hello.node_index)
        node = state.nodes.get(key)
        now = time.monotonic()
        if node is None:
            late = hello.standby_request and hello.standby_request not in state.awaited
            role = Role.TOO_LATE if late else Role.SPARE
            node = Node(key, hello.node, connection.peer, hello, None, role, now, hello.free_port)
            node.standby_request = hello.standby_request
            state.members.join(node)
            if not hello.standby_request:
                state.step_id = hello.step_id
        elif node.connection is not None and node.connection is not connection:
            node.connection.close()
        _log.info("%s has connected from %s: %s", node.name, connection.peer, node.role.value)
        reborn = hello.life > node.hello.life
        node.connection = connection
        node.hello = hello
        node.closed_at = None
        node.refused = False
        node.heard(now)
        node.refused_at = None
        connection.agent = node
        if node.role is Role.DEAD:
            state.reinstate(node)
        if reborn:
            self._reborn(node)
        self._acknowledge(node)
        replaceable = node.gone and state.config.mode != "observe"  # there, nobody has its ranks
        if replaceable or (state.ending and node.order is None):
            # The node must end: it was given up, and others may have its ranks, or it connects
            # when the job is over.
            state.bus.send_once(node, Finish(tuple((0, 0) for _ in hello.tasks)))
        elif isinstance(node.order, Start) and reborn:
            pass  # its ranks start with all others in the next epoch
        else:
            state.bus.resend(node)  # it may have been lost with the last connection
        self._warm_up(node)
        return node

    def _reborn(self, node: Node) -> None:
        """Note that its agent died and was started again: no rank nor memory of it is left."""
        state = self._state
        node.seen = 0
        node.stalled, node.stalled_at = (), {}
        node.counted, node.counted_shown = {}, {}
        node.warm.clear()
        node.stores.clear()
        node.stdin = dict.fromkeys(node.stdin, False)
        state.on_news(f"{node.name}: its node agent died and was restarted")
        ranks = [r for r in state.world.by_rank.values() if r.node is node and r.exit is None]
        if ranks and node.role is Role.ACTIVE and not state.stopped():
            at, kill = time.monotonic(), int(signal.SIGKILL)
            text = f"the robust-task of {node.name} died and took its ranks with it"
            first = ranks[0]
            state.failures.append(
                Failure("crash", at, node.last_word, node.name, first.rank, None, kill, text)
            )

    def _acknowledge(self, node: Node) -> None:
        self._state.bus.send_once(node, Ack(node.seen, self._state.interval))

    def _warm_up(self, node: Node) -> None:
        """Have a node without ranks import what the ranks of other nodes have imported."""
        if node.role is Role.SPARE:
            for warmup in filter(None, (self._warmup, self._rank_warmup)):
                warmup.code = self._state.code
                self._state.bus.send(node, warmup)

    def message(self, connection: Connection, message: Message) -> None:
        """Receive one message of an agent; all of them come through here."""
        state, world = self._state, self._state.world
        if isinstance(message, Hello):
            self.connected(connection, message)
            state.changed.set()
            return
        node = connection.agent
        if not isinstance(node, Node):
            connection.close()
            return
        node.heard(time.monotonic())
        if node.role is Role.DEAD and node.silent_as is not None:
            # This was still in its kernel's buffers. An agent that lives connects again: then the
            # node is back.
            connection.close()
            return
        if isinstance(message, NumberedMessage):
            if message.number > node.seen:
                job_log.heard(node.name, message)
                node.seen = message.number
                self._numbered(node, message)
            self._acknowledge(node)
        elif isinstance(message, Report):
            self._acknowledge(node)
            if message.epoch == world.epoch and node.role is Role.ACTIVE:
                for saved in message.saved:
                    state.on_store(node, saved)
                state.data.hear(node, message, node.last_word)
                stepping = bool(world.steppers) and world.all_stepped()
                self._beats(node, message)
                if stepping:
                    return  # steps as ever: nobody waits for that
        elif isinstance(message, Reply):
            state.bus.deliver(node, message)
        else:
            state.on_store(node, message)
        state.changed.set()

    def closed(self, connection: Connection) -> None:
        node = connection.agent
        if isinstance(node, Node) and node.connection is connection:
            node.connection = None
            node.closed_at = time.monotonic()
            _log.info("%s: the connection is closed", node.name)
            self._state.changed.set()

    # -- numbered messages

    def _numbered(self, node: Node, message: NumberedMessage) -> None:
        state = self._state
        if isinstance(message, Started):
            rank = self._rank(node, message.epoch, message.local)
            if rank is not None:
                state.world.note_started(rank, message.warm, message.kept)
        elif isinstance(message, Exited):
            self._exited(node, message)
        elif isinstance(message, Stopped):
            node.stopped = max(node.stopped, message.epoch)
            node.free_port = message.free_port
            node.stuck, node.stages, node.cut = message.stuck, message.stages, message.cut
            node.reading = message.reading
        elif isinstance(message, StdinRead):
            if message.whole:
                node.stdin.setdefault(message.local, True)
            elif message.local in node.stdin:  # what is gone does not come again
                node.stdin[message.local] = False
        elif isinstance(message, SlotLost):
            node.ours = True
            state.lose(node, f"a robust-task of {node.name} did not return")
        elif isinstance(message, Stalled):
            before, now = node.stalled_at, node.last_word
            node.stalled_at = {mount: before.get(mount, now) for mount in message.mounts}
            node.stalled, node.starting = message.mounts, message.starting
        elif isinstance(message, Counted):
            news = counters.news(counters.NodeGrowth(node.name, message.grown, node.counted))
            node.counted, node.reading = message.grown, message.reading
            state.on_counters(node.name, news)
        elif isinstance(message, Signalled):
            self._signalled(node, message.signum)
        elif isinstance(message, Logged):
            self.warnings.heard(time.monotonic(), node.name, message)
        elif isinstance(message, Wrote):
            state.wrote(message.paths)
        elif isinstance(message, WarmRanks):
            node.warm[message.local] = message.ready
        elif isinstance(message, WorkerEnded):
            state.on_tests(node, message)
        elif isinstance(message, Imports):
            state.learnt = True
            warmup = Warmup(message.learnt, message.ranks, message.environ)
            if message.ranks:
                self._rank_warmup = warmup
            else:
                self._warmup = warmup
            for each in state.nodes.values():
                self._warm_up(each)
        else:
            state.on_store(node, message)

    def _signalled(self, node: Node, signum: int) -> None:
        """Act on a signal that Slurm sent to a node's shims, and to the ranks there with them."""
        state = self._state
        own = [n for n in state.live() if not n.standby_request] or state.live()
        if own and node is own[0]:  # Slurm takes standby nodes' steps for steps of other jobs
            for other in state.live():
                if other.standby_request and other is not node:
                    state.bus.send(other, Signal(signum))
        if signum in ENDING and node.standby_request and node.role is Role.SPARE:
            # Slurm takes a standby node without ranks back: no loss, and nobody waits for it.
            state.members.move(node, Role.RELEASED)
            state.bus.send(node, Finish(tuple((0, 0) for _ in range(node.slots))))
            return
        if signum in ENDING:
            node.signalled = signum
            state.note_ending(lambda _node: True)
            return
        state.pass_on(signum)
        died = [f for f in state.failures if f.signal == signum]
        if died:  # a rank's death of it was reported first
            state.failures[:] = [f for f in state.failures if f not in died]
            state.signalled = signum

    def _rank(self, node: Node, epoch: int, local: int) -> Rank | None:
        if epoch != self._state.world.epoch or node.role is not Role.ACTIVE:
            return None
        rank = self._state.world.rank_at(node, local)
        return rank if rank is not None and rank.rank >= 0 else None

    def _exited(self, node: Node, message: Exited) -> None:
        state = self._state
        rank = self._rank(node, message.epoch, message.local)
        if rank is None:
            return
        state.world.note_exit(rank, message.code or 0, message.signal or 0)
        state.phases.pop(id(rank), None)
        ours = message.epoch <= state.stopping_epoch
        if ours or rank.exit == (0, 0) or not state.config.rank_env:
            return
        if message.signal in state.passed_on:
            # Somebody sent it, and it is no fault to die of it.
            state.signalled = message.signal
            return
        at = time.monotonic()
        state.failures.append(
            Failure(
                "crash",
                at,
                at - message.age,
                node.name,
                rank.rank,
                message.code,
                message.signal,
                message.tail,
                message.launched,
                facts=message.facts,
            )
        )

    # -- heartbeats

    def _beats(self, node: Node, message: Report) -> None:
        state, world = self._state, self._state.world
        now = node.last_word
        for beat in message.beats:
            rank = world.rank_at(node, beat.local)
            if rank is None:
                continue
            first = rank.beats == 0 and rank.rank >= 0 and rank.exit is None
            if beat.beats < rank.beats:  # torchrun started its rank again by itself
                state.progress.beats = 0
                rank.beats = 0
            good = rank.last_beat
            ahead = rank.take(beat, now)
            if rank.nan is not None or rank.nonfinite_norms:
                self._not_finite(rank, good)
            if first and rank.beats:
                world.note_first_step(rank)
            key = id(rank)
            if rank.phase:
                state.phases[key] = (rank.phase, rank.phase_since)
            elif key in state.phases:
                del state.phases[key]
            if ahead:
                self._advance(rank.step, rank.beats, rank.last_beat, rank.source)
                if state.config.spike == "warn" and not state.stopped():
                    for line in state.spikes.note(rank):
                        state.on_spike(line)
        name, since = next(iter(state.phases.values()), ("", 0.0))
        state.pace.in_phase(name, since, now)

    def _advance(self, step: int | None, beats: int, at: float, source: str) -> None:
        progress = self._state.progress
        if beats > progress.beats:
            self._state.pace.advance(at, beats - progress.beats)
            progress.counted(beats, at)
        if step is not None and source not in self._counting:
            progress.numbered = True
            first = step - beats + 1
            progress.resume = first if progress.resume is None else min(progress.resume, first)
            if progress.reached(step):
                self._state.nonfinite.reached(step)

    def _not_finite(self, rank: Rank, good: float) -> None:
        """Note a rank's loss that is not finite as a failure; ``good``: when it was last well.

        Of ranks that are being stopped, only the step is noted from which on no state is used.
        """
        state, now = self._state, rank.node.last_word
        if state.config.nan == "ignore":
            return
        failure = state.nonfinite.note(rank, state.world.epoch, now, good or now)
        if failure is not None:
            state.progress.not_finite(failure.step)
            if not state.stopped():
                state.failures.append(failure)
                state.changed.set()
