"""The node's agent: the shim with local id 0 speaks for its whole node.

It holds the node's only connection to the supervisor, passes orders to the node's other shims,
reads the ranks' beat records, and decides alone what to do when the supervisor is silent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from robust_slurm.settings import AFTER_SUPERVISOR
from srun_wrapper.agent.beats import NodeBeats
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.connections.probe import Probe
from srun_wrapper.agent.connections.shims import Shims
from srun_wrapper.agent.connections.silence import START, SilenceVerdict
from srun_wrapper.agent.connections.uplink import Uplink
from srun_wrapper.agent.counters.gpus import GpuReader
from srun_wrapper.agent.counters.watch import Counters
from srun_wrapper.agent.looking.answers import Answers
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.node_files import NodeFiles, directory
from srun_wrapper.agent.place import Place, job_of
from srun_wrapper.agent.processes.ports import free_port
from srun_wrapper.agent.processes.stop_stages import longest
from srun_wrapper.agent.processes.written import WrittenFiles
from srun_wrapper.protocol.checkpoint_messages import Enrolled, Saved
from srun_wrapper.protocol.file_messages import FindFiles
from srun_wrapper.protocol.messages import (
    Ack,
    Counted,
    Exited,
    Finish,
    Hello,
    Inspect,
    Inspected,
    Message,
    NumberedMessage,
    PeerAsk,
    PeerSay,
    RankBeat,
    Report,
    Signalled,
    SlotLost,
    Stalled,
    Start,
    Started,
    StdinRead,
    Stop,
    Stopped,
    Wrote,
    decode_to_agent,
)
from srun_wrapper.protocol.task_options import TaskOptions

TOLD = 0.2  # s for the news of a rank's end to reach robust-srun before the shims end
FAST = 0.02  # look at the records this often until every rank has made its first beat
FAST_FOR = 10.0  # s; a later first beat is seen an interval later at most


class Agent:
    """See the module. ``own`` takes orders for the slot of this very process."""

    def __init__(
        self,
        loop: Loop,
        place: Place,
        key: bytes,
        run_dir: Path,
        own: Callable[[Message], None],
        abandoned: Callable[[SilenceVerdict, Start | None], None],
        paths: Callable[[], set[str]] = set,
        life: int = 0,
        options: TaskOptions = TaskOptions(),  # noqa: B008 - frozen
    ) -> None:
        """``paths``: what starting a rank here touches; ``life``: agents that died before it."""
        self._life = life
        self._loop = loop
        self._place = place
        self._own = own
        self._abandoned = abandoned
        self._numbers = 0
        self._unacked: list[NumberedMessage] = []
        self._acked = 0
        self._interval = 0.25  # s; robust-srun says in its first answer what it is to be
        self._start: Start | None = None
        self._stopped: dict[int, Stopped] = {}
        self._stopping_epoch = 0
        self._beats = NodeBeats(run_dir)
        self._first_beats: set[int] = set()
        self._saved: dict[int, Saved] = {}
        self._report_at = self._fast_until = 0.0
        self._shims = Shims(
            loop, place, key, run_dir,
            joined=self._shim_joined, heard=self.from_slot,
            died=self._shim_died, lost=lambda local: self._numbered(SlotLost(0, local)),
        )  # fmt: skip
        self._files = NodeFiles(
            loop, lambda: list(self._shims.pids.values()), paths,
            lambda mounts, starting: self._numbered(Stalled(0, mounts, starting)),
            self._answer_inspection,
        )  # fmt: skip
        self._written = WrittenFiles(
            loop, lambda: list(self._shims.pids.values()),
            lambda paths: self._numbered(Wrote(0, paths)),
        )  # fmt: skip
        self._counters = Counters(
            loop, lambda grown: self._numbered(Counted(0, grown, self._counters.promised)),
            gpus=GpuReader(loop).read,
        )  # fmt: skip
        self._answers = Answers(lambda answer: self._uplink.send(answer))
        self._finished = False
        self.data_port = 0  # of the node's data process, for those of other nodes
        self.data_news: Callable[[float], bytes] = lambda _interval: b""
        self.first = max(START, options.task_start_limit)  # s: see ``judge_silence``
        self.mute = options.suspend_limit
        self.lost_host = options.outage_wait + AFTER_SUPERVISOR
        self._options = options
        self._exits: dict[int, tuple[int, int]] = {}
        self._running: dict[int, int] = {}  # slot -> epoch of its rank
        self._missed: set[int] = set()  # slots that the last Start did not reach
        self._uplink = Uplink(
            loop, place.server, place.port, key, self._introduce, self._from_server
        )
        self._probe = Probe(loop, key, place.server, self._answer_peer)
        if place.local_tasks == 1:
            self._uplink.connect()
        self._next_tick = self._loop.later(0.0, self._tick)

    # -- the node's other shims

    def _shim_joined(self, local: int) -> None:
        if local in self._missed and self._start is not None:
            self._missed.discard(local)
            self._shims.links[local].send(self._start)
        elif self._stopping_epoch:  # it has no rank to stop
            self._stopped.setdefault(local, Stopped(0, self._stopping_epoch, 0))
        if len(self._shims.tasks) == self._place.local_tasks:
            self._uplink.connect()

    def _shim_died(self, local: int) -> None:
        epoch = self._running.pop(local, 0)
        self._missed |= {local} if self._files.starting(local) else set()
        self._numbered(StdinRead(0, local, False))  # the input that it has kept died with it
        if epoch:
            text = f"the robust-task of {self._place.node} died and took its rank with it"
            died = Exited(0, epoch, local, None, int(signal.SIGKILL), 0.0, text)
            self._numbered(died)
            self._exited(local, died)
        self._check_stopped()

    # -- from the slots, this process's own included

    def from_slot(self, local: int, message: Message) -> None:
        if isinstance(message, Stopped):
            self._stopped[local] = message
            self._running.pop(local, None)
            self._check_stopped()
        elif isinstance(message, Inspected):
            complete = self._answers.add(local, message, len(self._shims.links) + 1)
            if complete and not self._files.looking:
                self._answer_inspection()
        elif isinstance(message, Started | Exited):
            self._files.started(message.epoch, message.local)
            if isinstance(message, Started):
                self._running[local] = message.epoch
                self._beats.forget(message.local)
            else:
                self._running.pop(local, None)
                self._report()  # the rank's last step, before the news of its end
            self._numbered(message)
            if isinstance(message, Exited):
                self._exited(local, message)
        elif isinstance(message, Saved):
            # Goes with the next report.
            self._saved[message.rank] = message.after(self._saved.get(message.rank))
        elif isinstance(message, NumberedMessage):
            if isinstance(message, Enrolled):  # what it said before it began anew
                self._saved.pop(message.rank, None)
            self._numbered(message)  # of the slot's store
        else:
            self._uplink.send(message)

    def _exited(self, local: int, message: Exited) -> None:
        """Note a rank's end. In observe mode, end the node's shims as its ranks ended."""
        if not self._options.alone:
            return
        self._exits[local] = message.code or 0, message.signal or 0
        bad = self._options.kill_on_bad and any(self._exits[local])
        if len(self._exits) == self._place.local_tasks or bad:
            exits, running = self._exits, (0, int(signal.SIGTERM))
            order = Finish(tuple(exits.get(n, running) for n in range(self._place.local_tasks)))
            self._loop.later(TOLD, lambda: self._end_alone(order))

    def _end_alone(self, order: Finish) -> None:
        self._finish()
        self.broadcast(order)

    def signalled(self, signum: int) -> None:
        ends = signum in (signal.SIGTERM, signal.SIGINT)
        self._uplink.contact.ending |= ends
        self._numbered(Signalled(0, signum))
        if ends and self._place.standby_request and self._start is None:
            # It never had ranks: give the node back without waiting for robust-srun's order.
            order = Finish(((0, 0),) * self._place.local_tasks)
            self._loop.later(TOLD, lambda: self._end_alone(order))

    def _answer_inspection(self) -> None:
        """Answer after the look at the file systems: a silent one must be known to judge ranks."""
        self._answers.release(self._files.answering(), self._counters.machine)

    def _check_stopped(self) -> None:
        if not self._stopping_epoch or not self.all_stopped():
            return
        stuck = tuple(pid for message in self._stopped.values() for pid in message.stuck)
        stages = longest(message.stages for message in self._stopped.values())
        cut = tuple(text for message in self._stopped.values() for text in message.cut)
        epoch, self._stopping_epoch = self._stopping_epoch, 0
        self._stopped.clear()
        self._files.stopped()
        self._report(epoch)
        self._numbered(Stopped(0, epoch, free_port(), stuck, stages, cut, self._counters.promise()))

    def _numbered(self, message: NumberedMessage) -> None:
        self._numbers += 1
        message.number = self._numbers
        self._unacked.append(message)
        self._uplink.send(message)

    # -- the supervisor

    def _introduce(self, link: Link) -> None:
        place = self._place
        link.send(Hello(
            place.job_id, place.step_id, place.node_index, place.node,
            tuple(task for _, task in sorted(self._shims.tasks.items())),
            place.step_nodes, place.step_tasks, self._probe.port, free_port(),
            place.standby_request, self._start.epoch if self._start else 0,
            self._acked, self._life, data_port=self.data_port,
            directory=directory(),
        ))  # fmt: skip
        for message in self._unacked:
            link.send(message)

    def _from_server(self, link: Link, payload: bytes) -> None:
        try:
            order = decode_to_agent(payload)
        except msgspec.MsgspecError as err:
            link.close(f"order not understood: {err}")
            return
        if isinstance(order, FindFiles):
            self._files.find(order, self._uplink.send)
            return
        if isinstance(order, Ack):
            self._acked = order.seen
            self._interval = order.interval
            self._unacked = [e for e in self._unacked if e.number > order.seen]
            return
        if isinstance(order, Start):
            self._stopping_epoch = self._start.epoch if self._start else -1
            self._start = order
            self._files.starts(
                order.epoch, [r.local for r in order.ranks if r.local in self._shims.tasks]
            )
            self._missed = {rank.local for rank in order.ranks} & self._shims.absent
            self._first_beats.clear()
            self._beats.begin(order.epoch)
            self._fast_until = time.monotonic() + FAST_FOR
            self._next_tick.cancel()
            self._next_tick = self._loop.later(FAST, self._tick)
        elif isinstance(order, Stop):
            self._stopping_epoch = order.epoch or -1
            self._missed.clear()
            self._files.stops()
            self._counters.start_reading()
        elif isinstance(order, Inspect):
            if not order.quick:
                self._answers.begin()
                self._files.ask_all()
            if order.machine:
                self._counters.inspect()
            elif not order.quick:
                self._counters.start_reading()
        elif isinstance(order, Finish):
            self._finish()
        self.broadcast(order)

    def broadcast(self, order: Message) -> None:
        """Give an order to every slot of this node."""
        if isinstance(order, Start | Stop):
            self._stopped.clear()
        self._shims.send(order)
        self._own(order)

    def _watch_supervisor(self) -> None:
        verdict = self._uplink.judge(self._interval, self.lost_host, self.mute, self.first)
        if verdict is not SilenceVerdict.FINE:
            self._finish()
            self._uplink.close()  # a supervisor that answers now must not count on this node
            self._abandoned(verdict, self._start)

    def all_stopped(self) -> bool:
        """Return whether every slot has obeyed the last Stop."""
        return self._stopped.keys() >= {self._place.local, *self._shims.links}

    def _finish(self) -> None:
        self._finished = True
        self._shims.over()
        self._uplink.over()

    def _answer_peer(self, ask: PeerAsk) -> PeerSay | None:
        if self._start is None or ask.job_id != job_of(self._place, self._start):
            return None
        return PeerSay(self._start.index, time.monotonic() - self._uplink.contact.since)

    # -- heartbeats

    def _tick(self) -> None:
        if self._finished:
            return
        self._next_tick = self._loop.later(self._interval, self._tick)  # first: the rest may raise
        self._watch_supervisor()
        beats = self._beats.read()
        self._files.tick(beats)
        if self._running:
            self._written.tick(beats)
        fresh = {b.local for b in beats if b.beats} - self._first_beats
        self._first_beats |= fresh
        now = time.monotonic()
        if fresh or now >= self._report_at:
            self._report_at = now + self._interval
            self._send_report(beats)
        late = self._start is not None and len(self._first_beats) < len(self._start.ranks)
        if late and now < self._fast_until:
            self._next_tick.cancel()
            self._next_tick = self._loop.later(FAST, self._tick)

    def _report(self, epoch: int = 0) -> None:
        """Report now; with an ``epoch``, only if no later one has begun."""
        if self._start is not None and epoch in (0, self._start.epoch):
            self._send_report(self._beats.read())

    def _send_report(self, beats: tuple[RankBeat, ...]) -> None:
        saved = tuple(self._saved.values())
        self._saved.clear()
        news = self.data_news(self._interval)
        self._uplink.send(Report(self._start.epoch if self._start else 0, beats, saved, news))

    def close(self) -> None:
        """Give sockets back; pending messages to the shims have been sent."""
        self._finished = True
        self._uplink.close()
        self._shims.close()
        self._probe.close()
