"""The agent of one node and the real server side of the wire, both in threads, on loopback."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from robust_slurm.config import Config
from srun_wrapper.agent.connections.silence import SilenceVerdict
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.node_agent import Agent
from srun_wrapper.agent.place import Place
from srun_wrapper.job.model import Role, real_world
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import (
    Exited,
    Finish,
    Hello,
    Message,
    RankStart,
    Start,
    Started,
    Stop,
    Stopped,
)
from srun_wrapper.protocol.server import Connection, listen
from srun_wrapper.supervisor.inbox import Inbox

Wanted = Callable[[], bool]


def wait(ready: Wanted, seconds: float = 10.0) -> None:
    until(ready, "what the agent is to do", seconds, 0.005)


class FakeSupervisor:
    """robust-srun's server and state, in a thread. ``mute``: it takes messages and says nothing."""

    def __init__(self) -> None:
        self.key = secrets.token_bytes(32)
        self.state = JobState(Config(interval=0.1, progress_regex=r"step (\d+)"), 12, "n0")
        self.inbox = Inbox(self.state)
        self.state.awaited.add(1)
        self.heard: list[Message] = []
        self.connections: list[Connection] = []
        self.mute = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server, self.port = self.run(listen(self.key, self._message, self.inbox.closed))

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
        self.inbox.message(connection, message)
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
        self.state.members.lay_out(places, ranks)
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

    def __init__(self, supervisor: FakeSupervisor, base: Path, **place: Any) -> None:
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
            "standby_request": 0,
            "server": "127.0.0.1",
            "port": supervisor.port,
        }
        self.place = Place(**(values | place))
        self.run_dir = base
        self.key = supervisor.key
        self.loop = Loop()
        self.orders: list[Message] = []
        self.verdicts: list[tuple[SilenceVerdict, Start | None]] = []
        self.agent = Agent(
            self.loop,
            self.place,
            supervisor.key,
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
def supervisor() -> Iterator[FakeSupervisor]:
    made = FakeSupervisor()
    yield made
    made.close()


@pytest.fixture
def shim(supervisor: FakeSupervisor, tmp_path: Path) -> Iterator[Shim]:
    made = Shim(supervisor, tmp_path)
    yield made
    made.close()


def start(epoch: int, **more: Any) -> Start:
    ranks = (RankStart(0, 0, {}),)
    values: dict[str, Any] = {"env": {"SLURM_JOB_ID": "12"}, "index": 0}
    values |= more
    return Start(epoch, values["env"], ranks, 0.5, values["index"], epoch == 1, 1, "n0", 29500)


def crash(epoch: int = 1, code: int = 1) -> Exited:
    return Exited(0, epoch, 0, code, None, 0.0, "tail")
