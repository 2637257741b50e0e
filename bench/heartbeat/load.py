"""A supervisor under the load of a large job: the real one, fed by simulated nodes.

``python -m bench.heartbeat.load serve STATE_DIR COUNTERS`` is robust-srun's own Supervisor with
all its parts (server, state, watches, roster writer), except that in srun's place it starts
``… feed``, a process that plays the agents of all nodes with the shims' own ``Link``: one
authenticated TCP connection per node over loopback, a Hello, the Started events after the Start
order, then a Report of all its ranks every interval. The job never ends; end it by a signal.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import random
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from robust_slurm.config import load
from robust_slurm.slurm import Slurm
from srun_wrapper.agent.connections.link import Link
from srun_wrapper.agent.loop import Loop
from srun_wrapper.command.layout import StepPlan
from srun_wrapper.command.srun_options import split
from srun_wrapper.command.steps import Launch, raise_file_limit
from srun_wrapper.job.state import JobState
from srun_wrapper.protocol.messages import (
    Ack,
    Hello,
    Message,
    RankBeat,
    Report,
    Start,
    Started,
    decode_to_agent,
)
from srun_wrapper.protocol.server import Connection
from srun_wrapper.protocol.task_options import TaskOptions
from srun_wrapper.supervisor.app import Supervisor
from srun_wrapper.supervisor.epoch import Begun
from srun_wrapper.supervisor.inbox import Inbox

NODES = int(os.environ.get("BENCH_NODES", "1250"))  # the tests take fewer
RANKS = 8
STEP_TIME = 1.0  # s per training step of the simulated job
CONNECTS = 64  # connections being made at the same time

_COUNTERS = struct.Struct("@qddd")


@dataclass(frozen=True, slots=True)
class Counters:
    """The supervisor's report to the benchmark. Times are monotonic seconds, 0: not yet."""

    messages: int = 0  # received from agents so far
    connected: float = 0.0  # first Hello
    complete: float = 0.0  # last node's first Hello
    started: float = 0.0  # the last Start order is with the kernel


class CounterFile:
    """Counters in a file in memory, so that reading them costs the supervisor nothing."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        if create:
            path.write_bytes(bytes(_COUNTERS.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _COUNTERS.size)

    def write(self, counters: Counters) -> None:
        _COUNTERS.pack_into(
            self._map,
            0,
            counters.messages,
            counters.connected,
            counters.complete,
            counters.started,
        )

    def read(self) -> Counters:
        return Counters(*_COUNTERS.unpack_from(self._map))


# ---------------------------------------------------------------- the supervisor's process


class CountedInbox(Inbox):
    """The supervisor's inbox, which tells of each message that it has taken in."""

    def __init__(self, state: JobState, heard: Callable[[Message], None]) -> None:
        super().__init__(state)
        self._heard = heard

    def message(self, connection: Connection, message: Message) -> None:
        super().message(connection, message)
        self._heard(message)


class LoadedSupervisor(Supervisor):
    """robust-srun's supervisor, counting what it hears. The feeder stands in for srun."""

    def __init__(self, launch: Launch, state_dir: Path, counters: CounterFile) -> None:
        super().__init__(load({"robust-state-dir": str(state_dir)}, env={}), launch, Slurm())
        self._counters = counters
        self.inbox = CountedInbox(self.state, self._heard)
        self.epochs.listeners.append(self._begun)
        self._messages = 0
        self._connected = self._complete = self._started = 0.0

    async def _launch_step(self) -> None:
        argv = [sys.executable, "-m", "bench.heartbeat.load", "feed"]
        env = {**os.environ, **self._secrets.env()}
        await self.step.start(argv, env, own_session=False)

    def _heard(self, message: Message) -> None:
        self._messages += 1
        if isinstance(message, Hello):
            self._connected = self._connected or time.monotonic()
            if not self._complete and len(self.state.nodes) == message.step_nodes:
                self._complete = time.monotonic()
        self._count()

    def _begun(self, _begun: Begun) -> None:
        self._started = time.monotonic()
        self._count()

    def _count(self) -> None:
        self._counters.write(
            Counters(self._messages, self._connected, self._complete, self._started)
        )


def serve(state_dir: Path, counters: Path) -> int:
    """Run the supervisor until a signal ends it."""
    raise_file_limit()
    env = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": str(NODES), "SLURMD_NODENAME": "n1"}
    command = split(["train"], {})
    launch = Launch(command, StepPlan(), TaskOptions(), env)

    async def run() -> int:
        return await LoadedSupervisor(launch, state_dir, CounterFile(counters)).run()

    return asyncio.run(run())


# ---------------------------------------------------------------- the feeder's process


class FedNode:
    """One simulated node: its connection and its ranks' records."""

    def __init__(
        self, loop: Loop, index: int, key: bytes, port: int, connected: Callable[[], None]
    ):
        self._loop = loop
        self._index = index
        self._connected = connected
        self._epoch = 0
        self._began = 0.0
        self._interval = 1.0
        self._ticking = False
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(("127.0.0.1", port))
        except BlockingIOError:
            pass
        self._link = Link(
            loop,
            sock,
            key,
            server=False,
            on_payload=self._order,
            on_close=_lost,
            on_ready=self._introduce,
        )

    def _introduce(self, link: Link) -> None:
        first = self._index * RANKS
        tasks = tuple(range(first, first + RANKS))
        name = f"n{self._index + 1}"
        # The supervisor's own port answers a probe as a live node does.
        port = int(os.environ["ROBUST_PORT"])
        link.send(Hello(1, "0", self._index, name, tasks, NODES, NODES * RANKS, port, 29500, 0, 0))
        self._connected()

    def _order(self, link: Link, payload: bytes) -> None:
        order = decode_to_agent(payload)
        if isinstance(order, Ack):
            self._interval = order.interval
        elif isinstance(order, Start):
            self._epoch = order.epoch
            self._began = time.monotonic()
            for local in range(RANKS):
                link.send(Started(local + 1, order.epoch, local, 1000 + local))
            if not self._ticking:
                self._ticking = True
                self._loop.later(random.uniform(0, self._interval), self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        step = int((now - self._began) / STEP_TIME)
        age = (now - self._began) % STEP_TIME
        beats = tuple(
            RankBeat(local, step, step, age, source="beat", loss=2.5, grad_norm=0.5)
            for local in range(RANKS)
        )
        self._link.send(Report(self._epoch, beats))
        self._loop.later(self._interval, self._tick)


def _lost(_link: Link, reason: str) -> None:
    print(f"bench feeder: a connection ended: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def feed(env: Mapping[str, str]) -> None:
    """Play all nodes until the supervisor ends us."""
    raise_file_limit()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    key, port = bytes.fromhex(env["ROBUST_STEP_KEY"]), int(env["ROBUST_PORT"])
    loop = Loop()
    waiting = iter(range(NODES))

    def connect_next() -> None:
        index = next(waiting, None)
        if index is not None:
            FedNode(loop, index, key, port, connect_later)

    def connect_later() -> None:
        loop.later(0.0, connect_next)

    for _ in range(CONNECTS):
        connect_next()
    loop.run()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        raise SystemExit(serve(Path(sys.argv[2]), Path(sys.argv[3])))
    feed(os.environ)
