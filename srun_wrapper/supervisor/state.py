"""The supervisor's state of its job, and the changes that messages make to it."""

from __future__ import annotations

import logging
import math
import re
import signal
import time
from collections.abc import Callable, Mapping

from robust_slurm.config import Config
from srun_wrapper.decide.diagnose import Failure, Symptom
from srun_wrapper.detect.nonfinite import Nans
from srun_wrapper.detect.pace import Pace
from srun_wrapper.protocol.messages import (
    Ack,
    Event,
    Exited,
    Finish,
    Hello,
    Imports,
    Logged,
    Message,
    Reply,
    Report,
    Signal,
    Signalled,
    SlotLost,
    Stalled,
    Start,
    Started,
    StdinRead,
    Stop,
    Stopped,
    WarmRanks,
    Warmup,
    WorkerEnded,
)
from srun_wrapper.protocol.server import Connection
from srun_wrapper.supervisor import job_log
from srun_wrapper.supervisor.bus import Bus
from srun_wrapper.supervisor.changes import Changes
from srun_wrapper.supervisor.membership import Membership
from srun_wrapper.supervisor.model import AgentKey, Node, Rank, Role, World
from srun_wrapper.supervisor.progress import Progress

INTERVALS = ((64, 0.25), (256, 0.5))  # up to so many nodes: s between reports
SLOWEST = 1.0  # s, with more
ENDING = (signal.SIGTERM, signal.SIGINT)
_log = logging.getLogger("robust-srun.nodes")


class JobState:
    """Roster, world and progress; ``changed`` is set after every message."""

    def __init__(self, config: Config, job_id: int, own_node: str) -> None:
        self.config = config
        self.job_id = job_id
        self.own_node = own_node
        self.step_id = "?"
        self.members = Membership(lambda text: self.on_news(text))
        self.pace = Pace(config.hang_floor, config.busy_limit, config.start_limit)
        self.progress = Progress()
        self.nans = Nans()
        self.failures: list[Failure] = []
        self.changed = Changes()
        self.bus = Bus(self.nodes, self.changed)
        self.phases: dict[int, tuple[str, float]] = {}
        self.signalled = 0  # the signal that ends the step, once it is being ended
        self.awaited: set[int] = set()  # companions that were asked for and may still come
        self.passed_on: set[int] = set()  # other signals that the ranks were sent on purpose
        self.passed_at = -math.inf  # when the last of them was
        self.early: set[int] = set()  # those of them that came when there were no ranks to get them
        self.ending = False  # the shims are told to finish
        self.on_news: Callable[[str], None] = lambda _text: None
        self.warmup: Warmup | None = None  # what the command imports
        self.rank_warmup: Warmup | None = None  # if it is a launcher: what its ranks do
        self.on_store: Callable[[Node, Message], None] = lambda _node, _message: None
        self.on_back: Callable[[Node], None] = lambda _node: None
        self.on_tests: Callable[[Node, WorkerEnded], None] = lambda _node, _message: None
        # Sources whose step numbers count from 1 in every process, wherever it resumed.
        groups = re.compile(config.progress_regex.encode()).groups
        self._counting = ("auto",) if groups else ("auto", "regex")

    # -- waiting

    async def until(self, ready: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``ready()``; False when ``timeout`` seconds pass first."""
        return await self.changed.until(ready, timeout)

    # -- views

    @property
    def nodes(self) -> Mapping[AgentKey, Node]:
        return self.members.nodes

    @property
    def world(self) -> World:
        return self.members.world

    @property
    def stopping_epoch(self) -> int:
        """Exits of this epoch and older ones are of our own making."""
        return self.members.stopping_epoch

    @property
    def interval(self) -> float:
        if self.config.interval > 0:
            return self.config.interval
        return next((s for most, s in INTERVALS if len(self.nodes) <= most), SLOWEST)

    def live(self) -> list[Node]:
        return [n for n in self.nodes.values() if not n.gone]

    def spares(self) -> list[Node]:
        """Idle nodes of the allocation that answer, the freshest word first."""
        ready = [
            n
            for n in self.nodes.values()
            if n.role is Role.SPARE and n.connection and not n.companion
        ]
        return sorted(ready, key=lambda n: -n.last_word)

    def vacant(self) -> tuple[str, ...]:
        return tuple(n.name for n in self.world.places if n.gone)

    def stopped(self) -> bool:
        """The ranks are down, or told to be, until the next epoch begins."""
        return self.stopping_epoch >= self.world.epoch

    def named(self, name: str) -> Node | None:
        """The node of that name that is in the job now, else any."""
        matches = [n for n in self.nodes.values() if n.name == name]
        return next((n for n in matches if not n.gone), matches[0] if matches else None)

    # -- messages

    def connected(self, connection: Connection, hello: Hello) -> Node:
        key = (hello.job_id, hello.step_id, hello.node_index)
        node = self.nodes.get(key)
        now = time.monotonic()
        if node is None:
            late = hello.companion and hello.companion not in self.awaited
            role = Role.TOO_LATE if late else Role.SPARE
            node = Node(key, hello.node, connection.peer, hello, None, role, now, hello.free_port)
            node.companion = hello.companion
            self.members.join(node)
            if not hello.companion:
                self.step_id = hello.step_id
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
            self._take_back(node)
        if reborn:
            self._reborn(node)
        connection.send(Ack(node.seen, self.interval))
        if node.gone or (self.ending and node.order is None):
            # It has been given up, and others may have its ranks: nothing of it may go on. Or it
            # comes when all is over.
            self.bus.send_once(node, Finish(tuple((0, 0) for _ in hello.tasks)))
        elif isinstance(node.order, Start) and reborn:
            pass  # its ranks start with all others in the next epoch
        else:
            self.bus.resend(node)  # it went under with the last connection
        self._warm_up(node)
        return node

    def _reborn(self, node: Node) -> None:
        """Its agent died and was started again: nothing is left of its ranks, nor of its memory."""
        node.seen = 0
        node.stalled = ()
        node.warm.clear()
        node.stores.clear()
        node.stdin = dict.fromkeys(node.stdin, False)
        self.on_news(f"{node.name}: its node agent died and was restarted")
        ranks = [r for r in self.world.by_rank.values() if r.node is node and r.exit is None]
        if ranks and node.role is Role.ACTIVE and self.stopping_epoch < self.world.epoch:
            at, kill = time.monotonic(), int(signal.SIGKILL)
            text = f"the robust-task of {node.name} died and took its ranks with it"
            first = ranks[0]
            self.failures.append(
                Failure("crash", at, node.last_word, node.name, first.rank, None, kill, text)
            )

    def _warm_up(self, node: Node) -> None:
        """A node without ranks imports what those of the others have imported."""
        if node.role is Role.SPARE:
            for warmup in filter(None, (self.warmup, self.rank_warmup)):
                self.bus.send(node, warmup)

    def message(self, connection: Connection, message: Message) -> None:
        """Everything an agent says comes through here."""
        if isinstance(message, Hello):
            self.connected(connection, message)
            self.changed.set()
            return
        node = connection.agent
        if not isinstance(node, Node):
            connection.close()
            return
        node.heard(time.monotonic())
        if node.role is Role.DEAD and node.silent_as is not None:
            # Its kernel still had that to send. An agent that lives connects anew: then it is back.
            connection.close()
            return
        if isinstance(message, Event):
            if message.number > node.seen:
                job_log.heard(node.name, message)
                node.seen = message.number
                self._event(node, message)
            connection.send(Ack(node.seen, self.interval))
        elif isinstance(message, Report):
            connection.send(Ack(node.seen, self.interval))
            if message.epoch == self.world.epoch and node.role is Role.ACTIVE:
                for saved in message.saved:
                    self.on_store(node, saved)
                stepping = bool(self.world.steppers) and self.world.all_stepped()
                self._beats(node, message)
                if stepping:
                    return  # steps as ever: nobody waits for that
        elif isinstance(message, Reply):
            self.bus.deliver(node, message)
        else:
            self.on_store(node, message)
        self.changed.set()

    def closed(self, connection: Connection) -> None:
        node = connection.agent
        if isinstance(node, Node) and node.connection is connection:
            node.connection = None
            node.closed_at = time.monotonic()
            _log.info("%s: the connection is closed", node.name)
            self.changed.set()

    # -- events

    def _event(self, node: Node, message: Event) -> None:
        if isinstance(message, Started):
            rank = self._rank(node, message.epoch, message.local)
            if rank is not None:
                self.world.note_started(rank, message.warm)
        elif isinstance(message, Exited):
            self._exited(node, message)
        elif isinstance(message, Stopped):
            node.stopped = max(node.stopped, message.epoch)
            node.free_port = message.free_port
            node.stuck, node.stages, node.cut = message.stuck, message.stages, message.cut
        elif isinstance(message, StdinRead):
            if message.whole:
                node.stdin.setdefault(message.local, True)
            elif message.local in node.stdin:  # what is gone does not come again
                node.stdin[message.local] = False
        elif isinstance(message, SlotLost):
            node.ours = True
            self._fail_node(node, "node_lost", f"a robust-task of {node.name} did not come back")
        elif isinstance(message, Stalled):
            if message.mounts and not node.stalled:
                node.stalled_at = node.last_word
            node.stalled, node.starting = message.mounts, message.starting
        elif isinstance(message, Signalled):
            self._signalled(node, message.signum)
        elif isinstance(message, Logged):
            job_log.agent_said(node.name, message.level, message.text, message.dropped)
        elif isinstance(message, WarmRanks):
            node.warm[message.local] = message.ready
        elif isinstance(message, WorkerEnded):
            self.on_tests(node, message)
        elif isinstance(message, Imports):
            warmup = Warmup(message.learnt, message.ranks, message.environ)
            if message.ranks:
                self.rank_warmup = warmup
            else:
                self.warmup = warmup
            for each in self.nodes.values():
                self._warm_up(each)
        else:
            self.on_store(node, message)

    def pass_on(self, signum: int) -> None:
        """Someone sends the ranks a signal that does not end the step."""
        self.passed_on.add(signum)
        self.passed_at = time.monotonic()
        if self.failures or self.stopping_epoch >= self.world.epoch:
            self.early.add(signum)  # no ranks yet, or they are to be stopped: the next ones get it

    def _signalled(self, node: Node, signum: int) -> None:
        """Slurm signalled a node's shims, and the ranks there with them."""
        own = [n for n in self.live() if not n.companion] or self.live()
        if own and node is own[0]:  # Slurm does not know that companions' steps belong to this one
            for other in self.live():
                if other.companion and other is not node:
                    self.bus.send(other, Signal(signum))
        if signum in ENDING:
            node.signalled = signum
            self.note_ending(lambda _node: True)
            return
        self.pass_on(signum)
        died = [f for f in self.failures if f.signal == signum]
        if died:  # a rank's death of it was reported first
            self.failures[:] = [f for f in self.failures if f not in died]
            self.signalled = signum

    def note_ending(self, answers: Callable[[Node], bool]) -> None:
        """Note that the step is being ended: every node of it that ``answers`` was signalled."""
        own = [n for n in self.live() if not n.companion] or self.live()
        told = [n.signalled for n in own if n.signalled or answers(n)]
        if told and all(told) and not self.signalled:
            self.signalled = told[0]
            self.changed.set()

    def _rank(self, node: Node, epoch: int, local: int) -> Rank | None:
        if epoch != self.world.epoch or node.role is not Role.ACTIVE:
            return None
        rank = self.world.rank_at(node, local)
        return rank if rank is not None and rank.rank >= 0 else None

    def _exited(self, node: Node, message: Exited) -> None:
        rank = self._rank(node, message.epoch, message.local)
        if rank is None:
            return
        self.world.note_exit(rank, message.code or 0, message.signal or 0)
        self.phases.pop(id(rank), None)
        if message.epoch <= self.stopping_epoch or rank.exit == (0, 0) or not self.config.rank_env:
            return
        if message.signal in self.passed_on:
            self.signalled = message.signal  # somebody sent it, and it is no fault to die of it
            return
        at = time.monotonic()
        self.failures.append(
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
            )
        )

    def _fail_node(
        self, node: Node, symptom: Symptom, why: str, *, silent: bool = False, shared: bool = False
    ) -> None:
        """A node is lost: ACTIVE ones are failures, idle ones only leave."""
        if node.gone:
            return
        was = node.role
        node.silent_as = was if silent else None
        # When the step is being ended, a shim that has gone has done what it was told.
        ended = (self.signalled or self.ending) and not silent
        self.members.move(node, Role.RELEASED if ended else Role.DEAD)
        at = time.monotonic()
        self.on_news(f"{node.name} is lost: {why}")
        if was is Role.ACTIVE:
            evidence = (f"{node.name}: {why}",)
            self.failures.append(
                Failure(symptom, at, node.last_word, node.name, evidence=evidence, shared=shared)
            )

    def lose(
        self, node: Node, why: str, symptom: Symptom = "node_lost", *, shared: bool = False
    ) -> None:
        self._fail_node(node, symptom, why, shared=shared)
        self.changed.set()

    def lose_silent(self, node: Node, why: str, *, shared: bool) -> None:
        """Give a node up for its silence; it is taken back if it answers before it is replaced."""
        self._fail_node(node, "node_lost", why, silent=True, shared=shared)
        self.changed.set()

    def _take_back(self, node: Node) -> None:
        """A node that was given up for its silence answers: unless another one has its place."""
        was, node.silent_as = node.silent_as, None
        if was is None or self.ending:
            return
        if was is Role.ACTIVE and self.world.place_of(node) is None:
            return
        self.members.move(node, was)
        self.on_news(f"{node.name} answers again and stays in the job")
        self.on_back(node)
        lost = [f for f in self.failures if f.node == node.name and f.symptom == "node_lost"]
        self.failures[:] = [f for f in self.failures if f not in lost]
        epoch = self.world.epoch
        if was is Role.ACTIVE and node.stopped < epoch <= self.stopping_epoch:
            node.order = Stop(epoch, self.config.stop_grace)  # as all others have been

    # -- heartbeats

    def _beats(self, node: Node, message: Report) -> None:
        now = node.last_word
        for beat in message.beats:
            rank = self.world.rank_at(node, beat.local)
            if rank is None:
                continue
            first = rank.beats == 0 and rank.rank >= 0 and rank.exit is None
            if beat.beats < rank.beats:  # torchrun started its rank again by itself
                self.progress.beats = 0
                rank.beats = 0
            good = rank.last_beat
            ahead = rank.take(beat, now)
            if rank.nan is not None or rank.odd_norms:
                self._not_finite(rank, good)
            if first and rank.beats:
                self.world.note_first_step(rank)
            key = id(rank)
            if rank.phase:
                self.phases[key] = (rank.phase, rank.phase_since)
            elif key in self.phases:
                del self.phases[key]
            if ahead:
                self._advance(rank.step, rank.beats, rank.last_beat, rank.source)
        name, since = next(iter(self.phases.values()), ("", 0.0))
        self.pace.in_phase(name, since, now)

    def _advance(self, step: int | None, beats: int, at: float, source: str) -> None:
        progress = self.progress
        if beats > progress.beats:
            self.pace.advance(at, beats - progress.beats)
            progress.beats = beats
        if step is not None and source not in self._counting:
            progress.numbered = True
            first = step - beats + 1
            progress.resume = first if progress.resume is None else min(progress.resume, first)
            if progress.reached(step):
                self.nans.reached(step)

    def _not_finite(self, rank: Rank, good: float) -> None:
        """A failure of each rank whose loss is not finite; ``good``: when it was last known well.

        Ranks that are being stopped say only from when on their states are not to be used.
        """
        now = rank.node.last_word
        if self.config.nan == "ignore":
            return
        failure = self.nans.note(rank, self.world.epoch, now, good or now)
        if failure is not None:
            self.progress.not_finite(failure.step)
            if self.stopping_epoch < self.world.epoch:
                self.failures.append(failure)
                self.changed.set()

    def nans_open(self) -> bool:
        """True if some nodes have yet to report whether their ranks' losses are finite."""
        since = self.nans.since
        if not since or time.monotonic() - since > 2 * self.interval:
            return False
        return any(n.role is Role.ACTIVE and n.last_word < since for n in self.world.places)

    def new_epoch(self) -> int:
        """Open the next epoch over the present places; returns its number."""
        self.members.begin_epoch()
        self.progress.new_epoch()
        self.nans.new_epoch()
        self.pace.new_epoch(time.monotonic())
        self.phases.clear()
        self.failures.clear()
        return self.world.epoch
