"""Starting processes in threads: the loop never waits for exec."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from waiting import until

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree, starting


class Starts:
    """A loop, and what came of one start."""

    def __init__(self, command: list[str], opens: Path | None = None) -> None:
        self.loop = Loop()
        self.began: list[tuple[int, int | None]] = []
        self.failed: list[Exception] = []

        def make(start: starting.Starting[int]) -> int:
            if opens is not None:
                os.close(os.open(opens, os.O_RDONLY))  # a fifo waits for its writer
            return start.popen(command, os.environ, stdout=subprocess.DEVNULL).pid

        self.start = starting.Starting(
            self.loop,
            make,
            lambda pid, status: self.began.append((pid, status)),
            self.failed.append,
        )

    def turn(self) -> None:
        self.loop.turn(0.05)
        starting.reaped(process_tree.reap())

    def wait(self) -> None:
        def over() -> bool:
            self.turn()
            return self.start.over

        until(over, "the start to be over", every=0.0)


def test_only_robust_task_starts_all_its_processes_by_fork() -> None:
    """A worker of the tests is large: fork() would take it ten times as long as vfork()."""
    assert subprocess._USE_VFORK  # type: ignore[attr-defined]


def test_a_process_is_started_and_dies_with_us() -> None:
    one = Starts(["sleep", "100"])
    one.wait()
    ((pid, status),) = one.began
    assert status is None and not one.failed
    until(lambda: process_tree.usage([pid]).state == "S", "the command runs", 5)
    # The thread that has forked must not end: the process would die with it, and at once.
    time.sleep(0.1)
    assert process_tree.usage([pid]).state == "S"
    os.kill(pid, signal.SIGKILL)
    until(lambda: pid in process_tree.reap(), "its end")


def test_a_command_that_is_not_there() -> None:
    one = Starts(["/no/such/command"])
    one.wait()
    assert isinstance(one.failed[0], FileNotFoundError) and not one.began


@pytest.mark.parametrize("go_on", [True, False])
def test_the_loop_goes_on_while_a_start_waits(tmp_path: Path, go_on: bool) -> None:
    os.mkfifo(tmp_path / "fifo")
    one = Starts(["true"], tmp_path / "fifo")
    for _ in range(3):
        one.turn()
    assert not one.start.over and not one.start.pid
    if not go_on:
        one.start.cancel()
    os.close(os.open(tmp_path / "fifo", os.O_WRONLY))
    one.wait()
    assert len(one.began) == go_on and not one.failed
    assert starting.unborn() == []


def test_a_process_that_ends_at_once_has_its_status() -> None:
    one = Starts(["false"])
    until(lambda: one.start.pid, "its pid")
    until(
        lambda: one.start.pid in (done := process_tree.reap()) and not starting.reaped(done),
        "its end",
    )
    one.wait()
    ((_, status),) = one.began
    assert status is not None and os.waitstatus_to_exitcode(status) == 1


def test_whatever_a_start_raises_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between fork and exec is a SubprocessError, which is no OSError."""
    monkeypatch.setattr(process_tree, "die_with_parent", lambda _signum: 1 / 0)
    one = Starts(["true"])
    one.wait()
    assert isinstance(one.failed[0], subprocess.SubprocessError) and not one.began


def test_no_thread_is_a_failed_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit that keeps a process from being forked also keeps a thread from being started."""

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    one = Starts(["true"])
    one.turn()
    (error,) = one.failed
    assert isinstance(error, OSError) and error.errno == errno.EAGAIN
    assert one.start.over and not starting._pending
