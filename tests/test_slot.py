"""One task slot with real processes. The slot runs in a process of its own (``_drive`` below),
because it ends everything beneath it; the test gives orders and reads events as JSON lines."""

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

from robust_slurm.record import BeatReader, record_path
from srun_wrapper import proc, slot
from srun_wrapper.loop import Loop
from srun_wrapper.messages import (
    Exited,
    Finish,
    FromShim,
    Inspect,
    Inspected,
    Message,
    RankStart,
    Signal,
    SlotHello,
    Start,
    Started,
    Stop,
    Stopped,
    ToShim,
)
from srun_wrapper.sinks import OutputPlan
from srun_wrapper.slot import Slot, SlotOptions

M = TypeVar("M", bound=Message)
IGNORES_TERM = "trap '' TERM; echo ready >&2; while :; do sleep 0.05; done"


class Driver:
    """The process with the slot."""

    def __init__(self, base: Path, command: list[str], **options: Any) -> None:
        self.base = base
        self.events: list[Message] = []
        ours, theirs = socket.socketpair()
        config = msgspec.json.encode({"command": command, "dir": str(base), **options}).decode()
        self.out = (base / "out").open("wb")
        self.err = (base / "err").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), config],
            pass_fds=[theirs.fileno()],
            stdout=self.out,
            stderr=self.err,
        )
        theirs.close()
        self._sock = ours
        self._rest = b""
        self.get(SlotHello)

    def order(self, message: Message) -> None:
        self._sock.sendall(msgspec.json.encode(message) + b"\n")

    def start(self, epoch: int = 1, grace: float = 0.2, local: int = 0, rank: int = 0) -> None:
        env = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "ROBUST_EPOCH": str(epoch)}
        ranks = (RankStart(local, rank, {"RANK": str(rank)}), RankStart(local + 1, rank + 1, {}))
        first = epoch == 1
        self.order(Start(epoch, env, ranks, grace, 0, first, 2, "127.0.0.1", 29500))

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

    def below(self) -> list[int]:
        return proc.descendants(self.process.pid)

    def stderr(self) -> str:
        return (self.base / "err").read_text(errors="replace")

    def stdout(self) -> str:
        return (self.base / "out").read_text(errors="replace")

    def wait_stderr(self, text: str, seconds: float = 10.0) -> None:
        self.wait(lambda: text in self.stderr(), seconds)

    def wait(self, ready: Any, seconds: float = 10.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            assert time.monotonic() < deadline, "not in time"
            select.select([], [], [], 0.005)

    def close(self) -> None:
        left = self.below()
        self.process.kill()
        self.process.wait(10)
        proc.end_all(left)
        self._sock.close()
        self.out.close()
        self.err.close()


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


def test_a_rank_runs_with_its_environment(drive: Any) -> None:
    d = drive("sh", "-c", 'echo "$RANK $ROBUST_EPOCH $ROBUST_BEAT_DIR"; env | grep -c STEP_KEY')
    started = d.launch(epoch=3, rank=5)
    assert (started.epoch, started.local) == (3, 0)
    exited = d.get(Exited)
    assert (exited.epoch, exited.local, exited.code, exited.launched) == (3, 0, 1, True)
    d.wait(lambda: "0\n" in d.stdout())
    assert d.stdout() == f"5 3 {d.base}\n0\n"


def test_its_beat_record_is_made(drive: Any) -> None:
    code = "import robust_slurm, sys; robust_slurm.beat(41, loss=0.5); sys.exit(7)"
    d = drive(sys.executable, "-c", code)
    d.start(epoch=2, rank=4)
    assert d.get(Exited).code == 7
    beat = BeatReader(record_path(str(d.base), 2, 0)).read()
    assert beat is not None
    assert (beat.step, beat.epoch, beat.rank, beat.source) == (41, 2, 4, "explicit")


@pytest.mark.parametrize(
    ("script", "code", "signum"),
    [
        ("exit 0", 0, None),
        ("exit 3", 3, None),
        ("kill -9 $$", None, 9),
        ("kill -11 $$", None, 11),
        ("exit 139", 139, None),
    ],
)
def test_how_it_ended(drive: Any, script: str, code: int | None, signum: int | None) -> None:
    d = drive("sh", "-c", script)
    d.start()
    exited = d.get(Exited)
    assert (exited.code, exited.signal) == (code, signum)


def test_the_tail_of_stderr_is_kept_and_carried(drive: Any) -> None:
    d = drive("sh", "-c", "seq 1 3000 >&2; echo 'ValueError: last words' >&2; exit 1")
    d.start()
    exited = d.get(Exited)
    assert exited.tail.endswith("3000\nValueError: last words\n")
    assert len(exited.tail) <= 4096
    d.wait_stderr("last words\n")
    assert d.stderr().startswith("1\n2\n3\n")


@pytest.mark.parametrize("command", ["no-such-command-anywhere", "/etc/passwd", "/"])
def test_a_command_that_cannot_run(drive: Any, command: str) -> None:
    d = drive(command)
    d.start()
    exited = d.get(Exited)
    assert (exited.code, exited.launched) == (2, False)
    assert f"cannot run '{command}'" in exited.tail
    d.wait_stderr(f"robust-task: cannot run '{command}': ")
    d.order(Stop(1, 0.1))  # and the shim goes on
    d.get(Stopped)


def test_a_rank_that_leaves_on_sigterm_has_its_time(drive: Any) -> None:
    d = drive("sh", "-c", "trap 'echo bye >&2; exit 0' TERM; echo ready >&2; sleep 60 & wait")
    d.launch()
    d.wait_stderr("ready")
    d.order(Stop(1, 10.0))
    stopped = d.get(Stopped)
    assert (stopped.epoch, stopped.stuck) == (1, ())
    assert d.below() == []
    d.wait_stderr("bye")
    assert not [e for e in d.events if isinstance(e, Exited)]  # an end on order is no event


def test_a_rank_that_ignores_sigterm_is_killed(drive: Any) -> None:
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch()
    d.wait_stderr("ready")
    began = time.monotonic()
    d.order(Stop(1, 0.3))
    d.get(Stopped)
    assert 0.25 < time.monotonic() - began < 5.0
    assert d.below() == []


def test_no_grace_is_no_ceremony(drive: Any) -> None:
    d = drive("sh", "-c", "trap 'echo told >&2' TERM; echo ready >&2; while :; do sleep 0.05; done")
    d.launch()
    d.wait_stderr("ready")
    d.order(Stop(1, 0.0))
    d.get(Stopped)
    assert d.below() == [] and "told" not in d.stderr()


@pytest.mark.parametrize("grace", [0.0, 5.0])
def test_grandchildren_in_their_own_session_end_too(drive: Any, grace: float) -> None:
    d = drive("sh", "-c", "setsid sh -c 'sleep 60 & sleep 60' & echo ready >&2; wait")
    d.launch()
    d.wait_stderr("ready")
    d.wait(lambda: len(d.below()) >= 4)
    d.order(Stop(1, grace))
    d.get(Stopped)
    assert d.below() == []


def test_what_a_crashed_rank_left_is_ended(drive: Any) -> None:
    d = drive("sh", "-c", "setsid sleep 60 & sleep 60 & exit 5")
    d.start()
    assert d.get(Exited).code == 5
    d.wait(lambda: d.below() == [])


def test_a_stopped_rank_ends(drive: Any) -> None:
    # No loop of a shell: stopped between vfork and exec, its child would keep it in state D.
    d = drive("sh", "-c", "echo ready >&2; exec sleep 60")
    started = d.launch()
    d.wait_stderr("ready")
    os.killpg(started.pid, signal.SIGSTOP)
    d.wait(lambda: proc.usage([started.pid]).state == "T")
    d.order(Stop(1, 5.0))
    d.get(Stopped)
    assert d.below() == []


def test_a_restart_leaves_nothing_of_the_last_epoch(drive: Any) -> None:
    d = drive("sh", "-c", "setsid sleep 60 & echo epoch $ROBUST_EPOCH >&2; sleep 60")
    first = d.launch(epoch=1)
    d.wait_stderr("epoch 1")
    d.wait(lambda: len(d.below()) == 3)
    before = set(d.below())
    second = d.launch(epoch=2)
    d.wait_stderr("epoch 2")
    d.wait(lambda: len(d.below()) == 3)
    assert not before & set(d.below())
    assert first.pid != second.pid and second.epoch == 2
    kinds = [type(e).__name__ for e in d.events]
    assert kinds == ["SlotHello", "Stopped", "Started", "Stopped", "Started"]


def test_only_the_newest_start_counts(drive: Any) -> None:
    """A second failure during a recovery: the orders overtake the ending of the ranks."""
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch(epoch=1)
    d.wait_stderr("ready")
    d.start(epoch=2, grace=0.5)
    d.start(epoch=3, grace=0.5)
    assert d.get(Started).epoch == 3
    d.order(Stop(3, 0.0))
    d.get(Stopped)
    assert [e.epoch for e in d.events if isinstance(e, Started)] == [1, 3]


def test_a_stop_during_the_ending_keeps_the_next_from_starting(drive: Any) -> None:
    d = drive("sh", "-c", IGNORES_TERM)
    d.launch(epoch=1)
    d.wait_stderr("ready")
    d.start(epoch=2, grace=30.0)
    d.order(Stop(1, 0.1))  # and the shorter grace wins
    d.get(Stopped, seconds=8.0)
    d.order(Inspect(5, 0.05))
    d.get(Inspected)
    assert d.below() == []
    assert [e.epoch for e in d.events if isinstance(e, Started)] == [1]


def test_a_slot_without_a_rank_only_stops(drive: Any) -> None:
    d = drive("sleep", "60")
    d.start(local=1)
    d.get(Stopped)
    d.order(Inspect(1, 0.05))
    sample = d.get(Inspected).samples[0]
    assert (sample.state, d.below()) == ("", [])


def test_signals_reach_the_whole_group(drive: Any) -> None:
    script = (
        "trap 'echo usr2 >&2' USR2; (trap 'echo too >&2' USR2; echo r >&2; sleep 9 & wait; wait)&"
    )
    d = drive("sh", "-c", script + "echo ready >&2; wait; wait")
    d.launch()
    d.wait_stderr("ready")
    d.wait_stderr("r\n")
    d.order(Signal(signal.SIGUSR2))
    d.wait_stderr("usr2")
    d.wait_stderr("too")


@pytest.mark.parametrize("inherit", [True, False])
def test_signals_reach_the_rank(drive: Any, inherit: bool) -> None:
    script = "trap 'echo told >&2; exit 4' USR1; echo ready >&2; while :; do sleep 0.05; done"
    d = drive("sh", "-c", script, inherit=inherit)
    d.launch()
    d.wait_stderr("ready")
    d.order(Signal(signal.SIGUSR1))
    assert d.get(Exited).code == 4


@pytest.mark.parametrize("inherit", [True, False])
def test_the_rank_dies_with_its_shim(drive: Any, inherit: bool) -> None:
    d = drive("sh", "-c", "exec sleep 60", inherit=inherit)
    rank = d.launch().pid
    d.process.kill()
    d.process.wait(10)
    d.wait(lambda: proc.usage([rank]).state in ("", "Z"))


def test_an_inspection_sees_what_the_rank_does(drive: Any) -> None:
    d = drive("sh", "-c", "echo ready >&2; exec sleep 60")
    started = d.launch()
    d.wait_stderr("ready")
    d.order(Inspect(3, 0.1))
    asleep = d.get(Inspected)
    assert (asleep.token, asleep.samples[0].local, asleep.samples[0].state) == (3, 0, "S")
    os.kill(started.pid, signal.SIGSTOP)
    d.order(Inspect(4, 0.1))
    assert d.get(Inspected).samples[0].state == "T"


def test_finish_gives_this_slots_exit(drive: Any) -> None:
    d = drive("sh", "-c", "exit 3")
    d.start()
    d.get(Exited)
    d.order(Finish(((3, 0), (0, 9))))
    assert d.process.wait(10) == 3


def test_output_files_and_labels_are_the_ranks(drive: Any) -> None:
    plan = {"label": True, "out": "{dir}/o-%t"}
    d = drive("sh", "-c", "echo out; echo err >&2; sleep 60", output=plan)
    d.launch(rank=1)
    path = d.base / "o-1"
    d.wait(lambda: path.exists() and path.read_text() == "1: out\n")
    d.wait_stderr("1: err\n")
    d.launch(epoch=2, rank=1)
    d.wait(lambda: path.read_text() == "1: out\n" * 2)  # a restart goes on in the same file


def test_an_output_file_that_cannot_be_made(drive: Any) -> None:
    d = drive("echo", "x", output={"out": "/proc/nowhere/o-%t"})
    d.start()
    exited = d.get(Exited)
    assert not exited.launched and "/proc/nowhere/o-0" in exited.tail


def test_steps_are_seen_in_the_output(drive: Any) -> None:
    script = "for i in 5 6 7; do echo step $i; done; exit 1"
    d = drive("sh", "-c", script, regex=r"step (\d+)")
    d.start()
    d.get(Exited)
    reader = BeatReader(record_path(str(d.base), 1, 0))
    d.wait(lambda: (b := reader.read()) is not None and b.beats == 3)
    beat = reader.read()
    assert beat is not None and (beat.step, beat.source) == (7, "regex")
    d.wait(lambda: d.stdout() == "step 5\nstep 6\nstep 7\n")


# ---------------------------------------------------------------- the process with the slot


def _drive(fd: int, config: dict[str, Any]) -> None:
    proc.become_subreaper()
    loop = Loop()
    sock = socket.socket(fileno=fd)
    base = Path(config["dir"])
    plan = config.get("output", {})
    if "out" in plan:
        plan["out"] = plan["out"].replace("{dir}", str(base))
    options = SlotOptions(
        tuple(config["command"]),
        OutputPlan(**plan),
        regex=config.get("regex", ""),
        inherit=config.get("inherit", False),
    )
    for name in slot.SECRETS:
        os.environ.pop(name, None)

    def emit(message: Message) -> None:
        sock.sendall(msgspec.json.encode(message) + b"\n")

    def finish(code: int, _signum: int) -> None:
        one.kill()
        os._exit(code)

    one = Slot(loop, 0, options, base, emit, finish)
    loop.on_signals([signal.SIGCHLD], lambda _signum: one.children_changed())
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

    loop.watch(sock, receive, write=False)
    emit(SlotHello(0, 0, os.getpid()))
    loop.run()
    one.kill()


if __name__ == "__main__":
    _drive(int(sys.argv[1]), msgspec.json.decode(sys.argv[2]))
