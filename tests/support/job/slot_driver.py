"""A slot with real processes, in a process of its own because it ends everything beneath it.

The test gives orders and reads events as JSON lines.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from places import REPOSITORY, SUPPORT
from waiting import until

from srun_wrapper.agent import slot
from srun_wrapper.agent.counters.gpus import GpuReader
from srun_wrapper.agent.looking import dumps
from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.place import SECRETS
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.slot import TaskSlot
from srun_wrapper.agent.task import PASSED_ON
from srun_wrapper.agent.warm import interpreter
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import (
    FromShim,
    Message,
    RankStart,
    SlotHello,
    Start,
    Started,
    Stop,
    Stopped,
    ToShim,
)
from srun_wrapper.protocol.task_options import OutputPlan, TaskOptions

M = TypeVar("M", bound=Message)

START = f"import sys; sys.path[:1] = {[*SUPPORT, str(REPOSITORY)]}; import slot_driver"
"""Found in any working directory, and not by PYTHONPATH, which the ranks have as well."""


class Driver:
    """The process with the slot."""

    def __init__(
        self,
        base: Path,
        command: list[str],
        path: str = "",
        **options: Any,
    ) -> None:
        self.base = base
        self.command = command
        self.events: list[Message] = []
        ours, theirs = socket.socketpair()
        config = msgspec.json.encode({"command": command, "dir": str(base), **options}).decode()
        self.out = (base / "out").open("wb")
        self.err = (base / "err").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{START}; slot_driver.main()", str(theirs.fileno()), config],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"},
            stdout=self.out,
            stderr=self.err,
        )
        theirs.close()
        self._sock = ours
        self._rest = b""
        self.get(SlotHello)

    def order(self, message: Message) -> None:
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def start(
        self,
        epoch: int = 1,
        grace: float = 0.2,
        local: int = 0,
        rank: int = 0,
        code: Code | None = None,
    ) -> None:
        env = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "ROBUST_EPOCH": str(epoch)}
        ranks = (RankStart(local, rank, {"RANK": str(rank)}), RankStart(local + 1, rank + 1, {}))
        first = epoch == 1
        order = Start(epoch, env, ranks, grace, 0, first, 2, "127.0.0.1", 29500)
        order.code = code
        self.order(order)

    def get(self, kind: type[M], seconds: float = 15.0) -> M:
        """The next event of that kind; all events are kept in ``events``."""
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._rest.partition(b"\n")
            if newline:
                self._rest = rest
                event: Message = msgspec.json.decode(line, type=FromShim)
                self.events.append(event)
                if isinstance(event, kind):
                    return event
                continue
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._sock], [], [], left)[0]
            assert ready, f"no {kind.__name__} after {self.events}"
            data = self._sock.recv(1 << 16)
            assert data, f"the slot's process has ended: {self.stderr()}"
            self._rest += data

    def launch(self, epoch: int = 1, **more: Any) -> Started:
        self.start(epoch, **more)
        self.get(Stopped)
        return self.get(Started)

    def stop_while_asked(self, pid: int) -> None:
        """The process asked for the second start hangs, then all is stopped: no process is left."""
        os.kill(pid, signal.SIGSTOP)
        self.start(2)
        self.get(Stopped)
        self.order(Stop(2, 0.0))
        self.get(Stopped)
        assert self.below() == []
        assert [e.epoch for e in self.events if isinstance(e, Started)] == [1]

    def below(self) -> list[int]:
        return process_tree.descendants(self.process.pid)

    def stderr(self) -> str:
        return (self.base / "err").read_text(errors="replace")

    def stdout(self) -> str:
        return (self.base / "out").read_text(errors="replace")

    def wait_stderr(self, text: str, seconds: float = 10.0) -> None:
        self.wait(lambda: text in self.stderr(), seconds)

    def wait(self, ready: Any, seconds: float = 10.0) -> None:
        until(ready, "what the slot is to do", seconds, 0.005)

    def wait_warm(self, ready: bool = True, seconds: float = 30.0) -> None:
        """An interpreter is (or is not) ready to become the next rank."""
        self.wait(lambda: (self.base / "warm").read_text() == str(ready), seconds)

    def close(self) -> None:
        """Orphans come to the process with the slot: stopped, it sees all and starts nothing."""
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGSTOP)
                until(lambda: _state(self.process.pid) in ("T", "Z"), "the slot's stop", every=0.0)
            until(self._all_ended, "the end of all processes", every=0.001)
        finally:
            self.process.kill()
            self.process.wait(10)
            self._sock.close()
            self.out.close()
            self.err.close()

    def _all_ended(self) -> bool:
        """Kill what is left: processes may have started others before they were killed."""
        left = [pid for pid in self.below() if _state(pid) not in ("", "Z")]
        process_tree.end_all(left)
        return not left


def _state(pid: int) -> str:
    return process_tree.usage([pid]).state


@pytest.fixture
def drivers(tmp_path: Path) -> Iterator[list[Driver]]:
    made: list[Driver] = []
    yield made
    for driver in made:
        driver.close()


@pytest.fixture
def drive(tmp_path: Path, drivers: list[Driver]) -> Any:
    def make(*command: str, **options: Any) -> Driver:
        drivers.append(Driver(tmp_path, list(command), **options))
        return drivers[-1]

    return make


# ---------------------------------------------------------------- the process with the slot


def _drive(fd: int, config: dict[str, Any]) -> None:
    process_tree.become_subreaper()
    loop = Loop()
    sock = socket.socket(fileno=fd)
    base = Path(config["dir"])
    plan = config.get("output", {})
    if "out" in plan:
        plan["out"] = plan["out"].replace("{dir}", str(base))
    interpreter.STAND_IN = config.get("stand_in", 3600.0)
    interpreter.ANSWER = slot.TAIL_WAIT = 5.0  # a machine that does other things too
    options = TaskOptions(
        OutputPlan(**plan),
        regex=config.get("regex", ""),
        inherit=config.get("inherit", False),
        warm=config.get("warm", False),
        warm_packages=tuple(config.get("packages", ())),
        work_limit=config.get("work_limit", 60.0),
    )
    if "py_spy" in config:
        dumps.py_spy = lambda: str(config["py_spy"])
    for name in SECRETS:
        os.environ.pop(name, None)

    def emit(message: Message) -> None:
        sock.sendall(msgspec.json.encode(message) + b"\n")

    def finish(code: int, _signum: int) -> None:
        one.close()
        os._exit(code)

    one = TaskSlot(loop, 0, options, tuple(config["command"]), base, emit, finish)
    loop.on_signals([signal.SIGCHLD], lambda _signum: one.children_changed())
    if "gpu_reader" in config:
        GpuReader(loop, config["gpu_reader"], base).read(lambda _found: None)
    # As robust-task: ignored from outside, they would be ignored by all that the slot starts.
    loop.on_signals(PASSED_ON, lambda _signum: None)
    rest = bytearray()

    def receive(_mask: int) -> None:
        data = sock.recv(1 << 16)
        if not data:
            loop.stop()
        rest.extend(data)
        while b"\n" in rest:
            line, _, left = bytes(rest).partition(b"\n")
            rest[:] = left
            order: Message = msgspec.json.decode(line, type=ToShim)
            one.handle(order)

    def tell(name: str, value: object) -> None:
        """A reader finds the old text or the new one, never an empty file."""
        fresh = base / f".{name}"
        fresh.write_text(str(value))
        fresh.replace(base / name)

    def tell_warm() -> None:
        own, broker = one._launcher.warm, one._launcher.broker
        ahead = own._ahead if own is not None else None
        tell("warm", own is not None and own.ready)
        tell("warm-off", own._off if own is not None else "")
        further = ahead is not None and ahead.further
        tell("warm-ahead", "ahead" if ahead is not None and further and ahead.ready else "")
        tell("stand-in", ahead.pid if ahead is not None and not further else 0)
        tell("making", own is not None and bool(own._ordered))
        tell("warm-ranks", broker.ready() if broker is not None else 0)
        interpreters = broker._warm.values() if broker is not None else ()
        tell("warm-asked", any(each._asked for each in interpreters))
        loop.later(0.02, tell_warm)

    tell_warm()
    loop.watch(sock, receive, write=False)
    emit(SlotHello(0, 0, os.getpid()))
    loop.run()
    one.close()


def main() -> None:
    """Start as the process with the slot: the socket's descriptor and the options are its words."""
    _drive(int(sys.argv[1]), msgspec.json.decode(sys.argv[2]))
