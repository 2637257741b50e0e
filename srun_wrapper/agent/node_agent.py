"""The node's agent: the shim with local id 0 speaks for its whole node.

It holds the node's only connection to the supervisor, passes orders to the node's other shims,
reads the ranks' beat records, and decides alone what to do when the supervisor is silent.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from srun_wrapper.agent.beats import NodeBeats
from srun_wrapper.agent.connections.guests import MOST, Guests
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.connections.silence import LOST_HOST, MUTE, Verdict
from srun_wrapper.agent.connections.uplink import Uplink
from srun_wrapper.agent.counters.watch import Counters
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.node_files import NodeFiles
from srun_wrapper.agent.place import Place, job_of, shim_address
from srun_wrapper.agent.processes.ports import free_port
from srun_wrapper.agent.processes.stop_stages import longest
from srun_wrapper.protocol.checkpoint_messages import Enrolled, Saved
from srun_wrapper.protocol.messages import (
    Ack,
    Counted,
    Event,
    Exited,
    Finish,
    Hello,
    Inspect,
    Inspected,
    Message,
    PeerAsk,
    PeerSay,
    RankBeat,
    Report,
    Signalled,
    SlotHello,
    SlotLost,
    SlotWelcome,
    Stalled,
    Start,
    Started,
    StdinRead,
    Stop,
    Stopped,
    decode_ask,
    decode_from_shim,
    decode_to_agent,
)

SHIM_HANDSHAKE = 30.0  # s; all shims of a node start at once
REBORN = 10.0  # s for a shim that died to be back
FAST = 0.05  # look at the records this often until every rank has made its first beat


class Agent:
    """See the module. ``own`` takes orders for the slot of this very process."""

    def __init__(
        self,
        loop: Loop,
        place: Place,
        key: bytes,
        run_dir: Path,
        own: Callable[[Message], None],
        abandoned: Callable[[Verdict, Start | None], None],
        paths: Callable[[], set[str]] = set,
        life: int = 0,
    ) -> None:
        """``paths``: what starting a rank here touches; ``life``: agents that died before it."""
        self._life = life
        self._loop = loop
        self._place = place
        self._key = key
        self._run_dir = run_dir
        self._own = own
        self._abandoned = abandoned
        self._links: dict[int, Link] = {}
        self._tasks: dict[int, int] = {place.local: place.task}
        self._slot_of: dict[Link, int] = {}
        self._numbers = 0
        self._unacked: list[Event] = []
        self._acked = 0
        self._interval = 0.25  # s; robust-srun says in its first answer what it is to be
        self._start: Start | None = None
        self._stopped: dict[int, Stopped] = {}
        self._stopping_epoch = 0
        self._beats = NodeBeats(run_dir)
        self._first_beats: set[int] = set()
        self._saved: dict[int, Saved] = {}
        self._samples: dict[int, dict[int, Inspected]] = {}
        self._report_at = 0.0
        self._pids: dict[int, int] = {place.local: os.getpid()}
        self._files = NodeFiles(
            loop, lambda: list(self._pids.values()), paths, self._stalled, self._answer_inspection
        )
        self._counters = Counters(loop, lambda grown: self._event(Counted(0, grown)))
        self._held: list[Inspected] = []
        self._finished = False
        self.mute = MUTE  # s without a word of robust-srun while its host answers
        self.lost_host = LOST_HOST  # s without an answer of robust-srun's host until it is lost
        self._running: dict[int, int] = {}  # slot -> epoch of its rank
        self._absent: set[int] = set()  # slots whose shims have died and are not back
        self._missed: set[int] = set()  # those that the last Start did not reach
        self._shims = Guests(loop, MOST + place.local_tasks, SHIM_HANDSHAKE)
        self._guests = Guests(loop)
        self._uplink = Uplink(
            loop, place.server, place.port, key, self._introduce, self._from_server
        )
        self._listener = self._listen_shims()
        self._probe = self._listen_probe()
        if place.local_tasks == 1:
            self._uplink.connect()
        self._next_tick = self._loop.later(0.0, self._tick)

    # -- the node's other shims

    def _listen_shims(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(shim_address(self._key, self._place))
        sock.listen(1024)
        sock.setblocking(False)
        self._loop.watch(sock, lambda _mask: self._accept_shim(sock), write=False)
        return sock

    def _accept_shim(self, sock: socket.socket) -> None:
        peer = self._loop.accept(sock)
        if peer is None:
            return
        link = Link(
            self._loop,
            peer,
            self._key,
            server=True,
            on_payload=self._from_shim,
            on_close=self._shim_gone,
        )
        self._shims.admit(link)

    def _from_shim(self, link: Link, payload: bytes) -> None:
        try:
            message = decode_from_shim(payload)
        except msgspec.MsgspecError:
            link.close("message not understood")
            return
        if isinstance(message, SlotHello):
            self._links[message.local] = link
            self._tasks[message.local] = message.task
            self._pids[message.local] = message.pid
            self._slot_of[link] = message.local
            link.send(SlotWelcome(str(self._run_dir)))
            self._absent.discard(message.local)
            if message.local in self._missed and self._start is not None:
                self._missed.discard(message.local)
                link.send(self._start)
            if len(self._tasks) == self._place.local_tasks:
                self._uplink.connect()
        else:
            self.from_slot(self._slot_of.get(link, -1), message)

    def _shim_gone(self, link: Link, _reason: str) -> None:
        local = self._slot_of.pop(link, -1)
        if local >= 0 and self._links.get(local) is link and not self._finished:
            del self._links[local]
            self._absent.add(local)
            epoch = self._running.pop(local, 0)
            self._event(StdinRead(0, local, False))  # the input that it has kept died with it
            if epoch:
                text = f"the robust-task of {self._place.node} died and took its rank with it"
                self._event(Exited(0, epoch, local, None, int(signal.SIGKILL), 0.0, text))
            self._check_stopped()
            self._loop.later(REBORN, lambda: self._shim_lost(local))

    def _shim_lost(self, local: int) -> None:
        """Its guardian has not started it again."""
        if local in self._absent and not self._finished:
            self._absent.discard(local)
            self._event(SlotLost(0, local))

    # -- from the slots, this process's own included

    def from_slot(self, local: int, message: Message) -> None:
        if isinstance(message, Stopped):
            self._stopped[local] = message
            self._running.pop(local, None)
            self._check_stopped()
        elif isinstance(message, Inspected):
            got = self._samples.setdefault(message.token, {})
            got[local] = message
            if len(got) >= len(self._links) + 1:
                samples = tuple(m.samples[0] for _, m in sorted(got.items()))
                del self._samples[message.token]
                self._held.append(Inspected(message.token, message.window, samples))
                if not self._files.looking:
                    self._answer_inspection()
        elif isinstance(message, Started | Exited):
            self._files.started(message.epoch, message.local)
            if isinstance(message, Started):
                self._running[local] = message.epoch
            else:
                self._running.pop(local, None)
                self._report()  # the rank's last step, before the news of its end
            self._event(message)
        elif isinstance(message, Saved):
            # Goes with the next report.
            self._saved[message.rank] = message.after(self._saved.get(message.rank))
        elif isinstance(message, Event):
            if isinstance(message, Enrolled):  # what it said before it began anew
                self._saved.pop(message.rank, None)
            self._event(message)  # of the slot's store
        else:
            self._to_server(message)

    def signalled(self, signum: int) -> None:
        if signum in (signal.SIGTERM, signal.SIGINT):
            self._uplink.contact.ending = True
        self._event(Signalled(0, signum))

    def _stalled(self, mounts: tuple[str, ...], starting: bool) -> None:
        self._event(Stalled(0, mounts, starting))

    def _answer_inspection(self) -> None:
        """Only now: that a file system does not answer must be known before ranks are judged."""
        held, self._held = self._held, []
        for message in held:
            message.answering = self._files.answering()
            message.machine = self._counters.machine
            try:
                self._to_server(message)
            except ValueError:  # larger than a message may be; the samples alone are not
                bare = tuple(
                    msgspec.structs.replace(sample, looks=()) for sample in message.samples
                )
                self._to_server(msgspec.structs.replace(message, samples=bare))

    def _check_stopped(self) -> None:
        waiting = {self._place.local, *self._links} - set(self._stopped)
        if waiting or not self._stopping_epoch:
            return
        stuck = tuple(pid for message in self._stopped.values() for pid in message.stuck)
        stages = longest(message.stages for message in self._stopped.values())
        cut = tuple(text for message in self._stopped.values() for text in message.cut)
        epoch, self._stopping_epoch = self._stopping_epoch, 0
        self._stopped.clear()
        self._files.stopped()
        self._report(epoch)
        self._event(Stopped(0, epoch, free_port(), stuck, stages, cut))

    def _event(self, message: Event) -> None:
        self._numbers += 1
        message.number = self._numbers
        self._unacked.append(message)
        self._to_server(message)

    def _to_server(self, message: Message) -> None:
        self._uplink.send(message)

    # -- the supervisor

    def _introduce(self, link: Link) -> None:
        place = self._place
        link.send(
            Hello(
                place.job_id,
                place.step_id,
                place.node_index,
                place.node,
                tuple(task for _, task in sorted(self._tasks.items())),
                place.step_nodes,
                place.step_tasks,
                self._probe.getsockname()[1],
                free_port(),
                place.companion,
                self._start.epoch if self._start else 0,
                self._acked,
                self._life,
            )
        )
        for event in self._unacked:
            link.send(event)

    def _from_server(self, link: Link, payload: bytes) -> None:
        try:
            order = decode_to_agent(payload)
        except msgspec.MsgspecError as err:
            link.close(f"order not understood: {err}")
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
                order.epoch, [r.local for r in order.ranks if r.local in self._tasks]
            )
            self._missed = {rank.local for rank in order.ranks} & self._absent
            self._first_beats.clear()
            self._beats.begin(order.epoch)
            self._next_tick.cancel()
            self._next_tick = self._loop.later(FAST, self._tick)
        elif isinstance(order, Stop):
            self._stopping_epoch = order.epoch or -1
            self._missed.clear()
            self._files.stops()
            self._counters.look()
        elif isinstance(order, Inspect):
            if not order.quick:
                self._samples.clear()  # of an inspection that a slot has not answered
                self._files.look()
                self._counters.look()
            if order.machine:
                self._counters.inspect()
        elif isinstance(order, Finish):
            self._finish()
        self.broadcast(order)

    def broadcast(self, order: Message) -> None:
        """Give an order to every slot of this node."""
        if isinstance(order, Start | Stop):
            self._stopped.clear()
        for shim in self._links.values():
            shim.send(order)
        self._own(order)

    def _watch_supervisor(self) -> None:
        verdict = self._uplink.judge(self._interval, self.lost_host, self.mute)
        if verdict is not Verdict.FINE:
            self._finish()
            self._uplink.close()  # a supervisor that answers now must not count on this node
            self._abandoned(verdict, self._start)

    def all_stopped(self) -> bool:
        """Return whether every slot has obeyed the last Stop."""
        return self._stopped.keys() >= {self._place.local, *self._links}

    def _finish(self) -> None:
        self._finished = True
        self._uplink.over()

    # -- being probed by the supervisor and by other agents

    def _listen_probe(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self._place.server else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.bind(("", 0))
        sock.listen(64)
        sock.setblocking(False)
        self._loop.watch(sock, lambda _mask: self._accept_probe(sock), write=False)
        return sock

    def _accept_probe(self, sock: socket.socket) -> None:
        peer = self._loop.accept(sock)
        if peer is None:
            return
        link = Link(
            self._loop,
            peer,
            self._key,
            server=True,
            on_payload=self._answer_peer,
            on_close=lambda _link, _reason: None,
        )
        self._guests.admit(link)
        self._loop.later(5.0, link.close)

    def _answer_peer(self, link: Link, payload: bytes) -> None:
        try:
            ask: PeerAsk = decode_ask(payload)
        except msgspec.MsgspecError:
            link.close("not a question")
            return
        if self._start is not None and ask.job_id == job_of(self._place, self._start):
            silent = time.monotonic() - self._uplink.contact.since
            link.send(PeerSay(self._start.index, silent))

    # -- heartbeats

    def _tick(self) -> None:
        if self._finished:
            return
        self._next_tick = self._loop.later(self._interval, self._tick)  # whatever fails below
        self._watch_supervisor()
        beats = self._beats.read()
        self._files.tick(beats)
        fresh = {b.local for b in beats if b.beats} - self._first_beats
        self._first_beats |= fresh
        now = time.monotonic()
        if fresh or now >= self._report_at:
            self._report_at = now + self._interval
            self._send_report(beats)
        if self._start is not None and len(self._first_beats) < len(self._start.ranks):
            self._next_tick.cancel()
            self._next_tick = self._loop.later(FAST, self._tick)

    def _report(self, epoch: int = 0) -> None:
        """Report now; of an epoch that is over only its own steps."""
        if self._start is not None and epoch in (0, self._start.epoch):
            self._send_report(self._beats.read())

    def _send_report(self, beats: tuple[RankBeat, ...]) -> None:
        saved = tuple(self._saved.values())
        self._saved.clear()
        self._to_server(Report(self._start.epoch if self._start else 0, beats, saved))

    def close(self) -> None:
        """Give sockets back; pending messages to the shims have been sent."""
        self._finished = True
        self._uplink.close()
        for link in self._links.values():
            link.close()
        for sock in (self._listener, self._probe):
            self._loop.forget(sock)
            sock.close()
