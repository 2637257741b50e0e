"""The node's agent against the real server side of the wire, on loopback."""

from __future__ import annotations

import asyncio
import queue
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from robust_slurm.config import Config
from robust_slurm.record import RecordWriter, create, record_path
from srun_wrapper import agent as agent_module
from srun_wrapper import silence
from srun_wrapper.agent import Agent, Place, shim_address
from srun_wrapper.link import Link
from srun_wrapper.loop import Loop
from srun_wrapper.messages import (
    Event,
    Exited,
    Finish,
    Hello,
    Inspect,
    Inspected,
    Message,
    Peer,
    RankStart,
    Report,
    Sample,
    SlotHello,
    SlotLost,
    SlotWelcome,
    Start,
    Started,
    Stop,
    Stopped,
    decode_to_shim,
)
from srun_wrapper.orphan import ask_peer
from srun_wrapper.roster import Role, World, real_world
from srun_wrapper.server import Connection, listen
from srun_wrapper.silence import Verdict
from srun_wrapper.state import JobState

Wanted = Callable[[], bool]


def wait(ready: Wanted, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not ready():
        assert time.monotonic() < deadline, "not in time"
        pause.wait(0.005)


class Boss:
    """robust-srun's server and state, in a thread. ``mute``: it takes messages and says nothing."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self.state = JobState(Config(interval=0.1, progress_regex=r"step (\d+)"), 12, "n0")
        self.state.awaited.add(1)
        self.heard: list[Message] = []
        self.connections: list[Connection] = []
        self.mute = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, self.port = self.run(listen(self.key, self._message, self.state.closed))

    def run(self, work: Awaitable[Any]) -> Any:
        async def wrapped() -> Any:
            return await work

        return asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(10.0)

    def do(self, call: Callable[..., Any], *args: Any) -> Any:
        async def work() -> Any:
            return call(*args)

        return self.run(work())

    def _message(self, connection: Connection, message: Message) -> None:
        if isinstance(message, Hello):
            self.connections.append(connection)
        if self.mute:
            return
        self.state.message(connection, message)
        self.heard.append(message)

    def of(self, kind: type[Any]) -> list[Any]:
        return [m for m in self.heard if isinstance(m, kind)]

    def order(self, message: Message) -> None:
        self.do(self._order, message)

    def _order(self, message: Message) -> None:
        (node,) = self.state.nodes.values()
        if isinstance(message, Start | Stop | Finish):
            node.order = message
        if node.connection is not None:
            node.connection.send(message)

    def activate(self) -> None:
        """Make the world of the one node that has reported, as the supervisor does."""
        self.do(self._activate)

    def _activate(self) -> None:
        places, ranks = real_world(list(self.state.nodes.values()))
        places[0].role = Role.ACTIVE
        self.state.world = World(0, places, ranks)
        self.state.new_epoch()

    def cut(self) -> None:
        for connection in list(self.connections):
            self.do(connection.close)

    def die(self) -> None:
        async def close() -> None:
            self._server.close()

        self.run(close())
        self.cut()

    def close(self) -> None:
        self.die()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()


class Shim:
    """The agent in its loop, with a slot that obeys at once."""

    def __init__(self, boss: Boss, base: Path, **place: Any) -> None:
        values: dict[str, Any] = {
            "job_id": 12,
            "step_id": "0",
            "node_index": 0,
            "node": "n0",
            "local": 0,
            "task": 0,
            "local_tasks": 1,
            "step_nodes": 1,
            "step_tasks": 1,
            "companion": 0,
            "server": "127.0.0.1",
            "port": boss.port,
        }
        self.place = Place(**(values | place))
        self.key = boss.key
        self.loop = Loop()
        self.orders: list[Message] = []
        self.verdicts: list[tuple[Verdict, Start | None]] = []
        self.agent = Agent(
            self.loop,
            self.place,
            boss.key,
            base,
            self._own,
            lambda verdict, start: self.verdicts.append((verdict, start)),
        )
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running = True
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while self._running:
                self.loop.turn(0.5)
                while not self._calls.empty():
                    self._calls.get()()
            self.agent.close()
        except BaseException as err:
            self._error = err
            raise

    def _own(self, order: Message) -> None:
        self.orders.append(order)
        if isinstance(order, Start | Stop):
            self.agent.from_slot(0, Stopped(0, order.epoch, 0))
        if isinstance(order, Start):
            self.agent.from_slot(0, Started(0, order.epoch, 0, 100))

    def call(self, work: Callable[[], None]) -> None:
        """Run in the loop's thread."""
        self._calls.put(work)
        self.loop.wake()

    def emit(self, message: Message) -> None:
        self.call(lambda: self.agent.from_slot(0, message))

    def close(self) -> None:
        self._running = False
        self.loop.wake()
        self._thread.join(10.0)
        assert not self._thread.is_alive()
        assert self._error is None


@pytest.fixture
def boss() -> Iterator[Boss]:
    made = Boss()
    yield made
    made.close()


@pytest.fixture
def shim(boss: Boss, tmp_path: Path) -> Iterator[Shim]:
    made = Shim(boss, tmp_path)
    yield made
    made.close()


def start(epoch: int, **more: Any) -> Start:
    ranks = (RankStart(0, 0, {}),)
    values: dict[str, Any] = {"env": {"SLURM_JOB_ID": "12"}, "index": 0}
    values |= more
    return Start(epoch, values["env"], ranks, 0.5, values["index"], epoch == 1, 1, "n0", 29500)


def crash(epoch: int = 1, code: int = 1) -> Exited:
    return Exited(0, epoch, 0, code, None, 0.0, "tail")


def numbers(events: list[Event]) -> list[int]:
    return [event.number for event in events]


def test_it_introduces_itself_and_reports(boss: Boss, shim: Shim) -> None:
    wait(lambda: len(boss.of(Report)) >= 3)
    hello = boss.of(Hello)[0]
    assert (hello.job_id, hello.node, hello.tasks, hello.epoch) == (12, "n0", (0,), 0)
    assert hello.probe_port and hello.free_port
    assert boss.of(Report)[0] == Report(0, ())
    (node,) = boss.state.nodes.values()
    assert node.address == "127.0.0.1"


def test_an_epoch(boss: Boss, shim: Shim) -> None:
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    boss.order(start(1))
    wait(lambda: bool(boss.of(Started)))
    wait(boss.state.world.all_started)
    assert shim.orders == [start(1)]
    shim.emit(crash())
    wait(lambda: len(boss.state.failures) == 1)
    boss.order(Stop(1, 0.2))
    (node,) = boss.state.nodes.values()
    wait(lambda: node.stopped == 1)
    boss.order(Finish(((1, 0),)))
    wait(lambda: Finish(((1, 0),)) in shim.orders)


def test_events_survive_a_cut_connection_and_count_once(boss: Boss, shim: Shim) -> None:
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    boss.order(start(1))
    wait(boss.state.world.all_started)
    for _ in range(5):
        before = len(boss.of(Hello))
        shim.emit(Started(0, 1, 0, 1))
        boss.cut()
        shim.emit(Started(0, 1, 0, 2))
        wait(lambda n=before: len(boss.of(Hello)) > n)  # type: ignore[misc]
    shim.emit(crash())
    (node,) = boss.state.nodes.values()
    # Stopped, Started, ten more, Exited. A message is in `heard` after the state has taken it.
    wait(lambda: 13 in numbers(boss.of(Event)))
    assert node.seen == 13
    assert sorted(set(numbers(boss.of(Event)))) == list(range(1, 14))
    assert len(boss.state.failures) == 1
    assert [h.epoch for h in boss.of(Hello)] == [0, 1, 1, 1, 1, 1]
    assert shim.verdicts == []


def test_events_while_nobody_acknowledges_are_sent_again(
    boss: Boss, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor took an event from the socket and lost it with the connection."""
    monkeypatch.setattr(agent_module, "QUIET", 0.3)
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    boss.order(start(1))
    wait(boss.state.world.all_started)
    boss.mute = True
    shim.emit(crash(code=3))
    wait(lambda: len(boss.connections) >= 2)
    boss.mute = False
    wait(lambda: len(boss.state.failures) == 1)
    assert boss.state.failures[0].code == 3


def test_an_order_that_went_under_is_given_again(boss: Boss, shim: Shim) -> None:
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    (node,) = boss.state.nodes.values()
    node.order = start(1)  # sent into a connection that was breaking
    boss.cut()
    wait(boss.state.world.all_started)
    assert shim.orders == [start(1)]


def test_a_mute_supervisor_is_not_stormed(
    boss: Boss, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes connections but does not answer: the line is made anew now and then, not always."""
    monkeypatch.setattr(agent_module, "QUIET", 0.3)
    wait(lambda: bool(boss.of(Hello)))
    boss.mute = True
    began = time.monotonic()
    wait(lambda: len(boss.connections) >= 4)
    assert time.monotonic() - began >= 3 * 0.3 - 0.1
    boss.mute = False
    heard = len(boss.heard)
    wait(lambda: len(boss.heard) > heard + 3)
    assert shim.verdicts == []


def test_a_supervisor_that_is_stopped_is_waited_for(
    boss: Boss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its kernel answers (Ctrl-Z): one waiting connection, no verdict."""
    monkeypatch.setattr(agent_module, "CONNECT_TIMEOUT", 0.1)
    monkeypatch.setattr(silence, "LOST_HOST", 0.3)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as stopped:
        shim = Shim(boss, tmp_path, port=stopped.getsockname()[1])
        stopped.settimeout(5.0)
        conn, _ = stopped.accept()
        stopped.settimeout(0.8)
        with pytest.raises(TimeoutError):
            stopped.accept()
        assert shim.verdicts == []
        shim.close()
        conn.close()


def test_a_dead_supervisor(boss: Boss, shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "DEAD_SUPERVISOR", 0.5)
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    boss.order(start(1))
    wait(lambda: len(shim.orders) == 1)
    boss.die()
    died = time.monotonic()
    wait(lambda: bool(shim.verdicts))
    assert 0.4 < time.monotonic() - died < 5.0
    assert shim.verdicts == [(Verdict.SUPERVISOR_DEAD, start(1))]


def test_a_supervisor_that_never_was(
    boss: Boss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals over loopback come at once, out of connect() itself: no reason to fall over."""
    monkeypatch.setattr(silence, "START", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    shim = Shim(boss, tmp_path, port=port)
    wait(lambda: bool(shim.verdicts))
    assert shim.verdicts == [(Verdict.SUPERVISOR_DEAD, None)]
    shim.close()


def test_a_lost_host(boss: Boss, shim: Shim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silence, "LOST_HOST", 0.5)
    wait(lambda: bool(boss.of(Report)))
    # No route leads there, so connect() fails at once and no packet leaves.
    shim.agent._place = replace(shim.place, server="255.255.255.255")
    boss.cut()
    wait(lambda: bool(shim.verdicts))
    assert shim.verdicts == [(Verdict.HOST_LOST, None)]


def test_a_short_break_is_no_verdict(
    boss: Boss, shim: Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "LOST_HOST", 2.0)
    wait(lambda: bool(boss.of(Report)))
    shim.agent._place = replace(shim.place, server="255.255.255.255")
    boss.cut()
    hellos = len(boss.of(Hello))
    wait(lambda: shim.agent._contact.unreachable_since is not None)
    shim.agent._place = shim.place
    wait(lambda: len(boss.of(Hello)) > hellos)
    wait(lambda: shim.agent._contact.unreachable_since is None)
    assert shim.verdicts == []


@pytest.mark.parametrize("companion", [0, 1])
def test_peers_get_an_answer(
    boss: Boss, tmp_path: Path, companion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a companion, whose own job has another number."""
    monkeypatch.setattr("srun_wrapper.orphan.ASK", 0.4)
    shim = Shim(boss, tmp_path, companion=companion, job_id=12 if not companion else 99)
    wait(lambda: bool(boss.of(Hello)))
    peer = Peer(4, "127.0.0.1", boss.of(Hello)[0].probe_port)
    boss.order(start(1, index=4))
    wait(lambda: len(shim.orders) == 1)
    silent = ask_peer(peer, boss.key, 12)
    assert silent is not None and 0 <= silent < 2.0
    assert ask_peer(peer, b"another step's key", 12) is None
    assert ask_peer(peer, boss.key, 13) is None
    shim.close()


def test_beats_are_read_and_old_records_forgotten(boss: Boss, shim: Shim, tmp_path: Path) -> None:
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    for epoch in (1, 2, 3):
        path = record_path(str(tmp_path), epoch, 0)
        create(path, epoch=epoch, local_rank=0, rank=0)
        if epoch > 1:
            boss.do(boss.state.new_epoch)
        boss.order(start(epoch))
        writer = RecordWriter(path)
        writer.beat(10 * epoch)
        writer.close()
        wait(lambda e=epoch: boss.state.progress.best == 10 * e)  # type: ignore[misc]
    assert sorted(p.name for p in tmp_path.glob("*.beat")) == ["2-0.beat", "3-0.beat"]
    reports = [r for r in boss.of(Report) if r.epoch == 3 and r.beats]
    beat = reports[-1].beats[0]
    assert (beat.local, beat.step, beat.beats, beat.source) == (0, 30, 1, "regex")
    assert 0.0 <= beat.age < 10.0


def test_the_last_step_comes_before_the_end(boss: Boss, shim: Shim, tmp_path: Path) -> None:
    wait(lambda: bool(boss.of(Hello)))
    boss.activate()
    path = record_path(str(tmp_path), 1, 0)
    create(path, epoch=1, local_rank=0, rank=0)
    boss.order(start(1))
    wait(lambda: bool(boss.of(Started)))
    writer = RecordWriter(path)
    for step in range(1, 50):
        writer.beat(step)
    shim.emit(crash())
    wait(lambda: len(boss.state.failures) == 1)
    assert boss.state.progress.best == 49
    writer.close()


class Second:
    """The node's other shim, in the agent's loop."""

    def __init__(self, shim: Shim, key: bytes) -> None:
        self.got: list[Message] = []
        self.link: Link | None = None

        def connect() -> None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.connect(shim_address(key, shim.place))
            self.link = Link(
                shim.loop,
                sock,
                key,
                server=False,
                on_payload=lambda _link, payload: self.got.append(decode_to_shim(payload)),
                on_close=lambda _link, _reason: None,
            )
            self.link.send(SlotHello(1, 1, 4242))

        shim.call(connect)

    def say(self, shim: Shim, message: Message) -> None:
        link = self.link
        assert link is not None
        shim.call(lambda: link.send(message))


@pytest.fixture
def two(boss: Boss, tmp_path: Path) -> Iterator[tuple[Shim, Second]]:
    shim = Shim(boss, tmp_path, local_tasks=2, step_tasks=2)
    second = Second(shim, boss.key)
    wait(lambda: bool(boss.of(Hello)))
    yield shim, second
    shim.close()


Two = tuple[Shim, Second]


def test_a_node_speaks_when_all_its_shims_are_there(boss: Boss, two: Two, tmp_path: Path) -> None:
    _shim, second = two
    assert boss.of(Hello)[0].tasks == (0, 1)
    wait(lambda: second.got == [SlotWelcome(str(tmp_path))])


def test_a_node_has_stopped_when_all_its_slots_have(boss: Boss, two: Two) -> None:
    shim, second = two
    boss.activate()
    boss.order(Stop(1, 0.1))
    wait(lambda: Stop(1, 0.1) in second.got and Stop(1, 0.1) in shim.orders)
    reports = len(boss.of(Report))
    wait(lambda: len(boss.of(Report)) > reports + 1)
    assert boss.of(Stopped) == []
    second.say(shim, Stopped(0, 1, 0, (77,)))
    wait(lambda: bool(boss.of(Stopped)))
    stopped = boss.of(Stopped)[0]
    assert (stopped.epoch, stopped.stuck) == (1, (77,))
    assert stopped.free_port


def test_an_inspection_answers_for_the_whole_node(boss: Boss, two: Two) -> None:
    shim, second = two
    boss.order(Inspect(5, 0.1))
    wait(lambda: Inspect(5, 0.1) in second.got)
    second.say(shim, Inspected(5, 0.1, (Sample(1, "S", 0.0, 0),)))
    shim.emit(Inspected(5, 0.1, (Sample(0, "R", 1.0, 0),)))
    wait(lambda: bool(boss.of(Inspected)))
    assert [s.local for s in boss.of(Inspected)[0].samples] == [0, 1]


def test_a_lost_shim_is_news(boss: Boss, two: Two) -> None:
    shim, second = two
    boss.activate()
    link = second.link
    assert link is not None
    shim.call(link.close)
    wait(lambda: bool(boss.of(SlotLost)))
    assert boss.of(SlotLost)[0].local == 1
    assert [f.symptom for f in boss.state.failures] == ["node_lost"]


def test_a_shim_without_the_key_is_nobody(boss: Boss, two: Two) -> None:
    shim, _second = two
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(shim_address(boss.key, shim.place))
        stranger.sendall(b"hello, I am local id 1\n")
        stranger.settimeout(5.0)
        while stranger.recv(4096):
            pass
    assert boss.of(SlotLost) == []


def test_the_shims_meet_where_only_the_key_leads(boss: Boss, shim: Shim) -> None:
    address = shim_address(boss.key, shim.place)
    assert address.startswith(b"\0robust-")
    assert address != shim_address(b"x" * 32, shim.place)
    assert address != shim_address(boss.key, replace(shim.place, node_index=1))
