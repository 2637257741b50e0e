"""Signs of work below a slot, with real processes, sockets and a debugger."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from places import PROGRAMS
from waiting import until

from robust_slurm import process_stat
from srun_wrapper.agent.looking import work
from srun_wrapper.agent.looking.roles import TreeProcess, is_stopped
from srun_wrapper.agent.looking.work import socket_bytes, tracer, used

MB = 1 << 20


@contextmanager
def child(code: str) -> Iterator[subprocess.Popen[str]]:
    """Run Python code that prints a line when it is ready, and again after each line of stdin."""
    pipe = subprocess.PIPE
    argv = [sys.executable, "-u", "-c", code]
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_what_a_connection_carries_is_seen(family: socket.AddressFamily) -> None:
    """An upload by send(), which /proc/PID/io does not count."""
    host = "127.0.0.1" if family is socket.AF_INET else "::1"
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind((host, 0))
        server.listen()
        port = server.getsockname()[1]
        code = (
            f"import socket, sys; s = socket.create_connection(({host!r}, {port})); print()\n"
            f"for _ in sys.stdin: s.sendall(bytes({MB})); print()"
        )
        with child(code) as process:
            end, _ = server.accept()
            before = used([process.pid], ())
            sent = threaded(lambda: go_on(process))
            got = 0
            while got < MB:
                got += len(end.recv(MB))
            sent()
            until(lambda: used([process.pid], ()).sockets - before.sockets >= MB, "1 MB was sent")
            assert used([process.pid], ()).io - before.io < MB // 4
            end.close()


def threaded(work: Callable[[], None]) -> Callable[[], None]:
    """Run ``work`` beside the test; the function returned waits for it."""
    thread = Thread(target=work)
    thread.start()
    return lambda: thread.join(10.0)


def test_a_process_without_connections_has_carried_nothing() -> None:
    assert socket_bytes([]) == 0 == socket_bytes([1])


@pytest.mark.parametrize(
    ("work", "field"),
    [
        ("m = mmap.mmap(-1, 8 << 20); m.write(bytes(len(m)))", "faults"),
        ("f = open('/dev/null', 'wb', 0); f.write(bytes(8 << 20))", "io"),
        ("subprocess.Popen(['sleep', '60'])", "processes"),
    ],
)
def test_work_changes_the_counters(work: str, field: str) -> None:
    code = f"import mmap, subprocess, sys; print()\nfor _ in sys.stdin: {work}; print()"
    with child(code) as process:
        tree = lambda: [process.pid, *children(process.pid)]  # noqa: E731
        before = used(tree(), ())
        again = used(tree(), ())
        assert getattr(again, field) == getattr(before, field)
        go_on(process)
        after = used(tree(), ())
        assert getattr(after, field) != getattr(before, field)
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    return [one for one, parent in process_stat.parents().items() if parent == pid]


def test_the_cpu_of_a_rank_with_a_gpu_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for a GPU spins. The file stands for the device, which this machine has not."""
    device = tmp_path / "nvidia0"
    device.touch()
    with child(f"f = open({str(device)!r}); print()\nwhile True: pass") as process:
        until(lambda: used([process.pid], [process.pid]).cpu > 0.1, "some CPU time")
        monkeypatch.setattr(work, "GPUS", (str(tmp_path / "nvidia"),))
        assert used([process.pid], [process.pid]).cpu == 0.0
        assert used([process.pid], ()).cpu > 0.1


def test_a_debugger_is_named() -> None:
    with child("import time; print(); time.sleep(60)") as process:
        assert tracer([process.pid]) == ""
        argv = [sys.executable, str(PROGRAMS / "tracer.py"), str(process.pid)]
        pipe = subprocess.PIPE
        with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as debugger:
            assert debugger.stdout is not None and debugger.stdin is not None
            assert debugger.stdout.readline() == "attached\n"
            name = process_stat.read(debugger.pid).name
            assert tracer([os.getpid(), process.pid]) == f"{name} (pid {debugger.pid})"
            debugger.stdin.close()
            debugger.wait(10)
        assert tracer([process.pid]) == ""


def tree(*states: str) -> list[TreeProcess]:
    """A chain of processes, each the child of the one before it; pids 1, 2, …"""
    return [TreeProcess(n + 1, n, state, python=False) for n, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "ranks", "stopped"),
    [
        ("ST", (2,), True),  # a shell, and its rank
        ("SST", (2,), False),  # a helper of the rank
        ("ST", (), True),  # a program in C below a shell
        ("STS", (), False),  # something below it still runs
        ("TT", (), True),
        ("SS", (), False),
        ("St", (2,), False),  # a debugger has it
    ],
)
def test_which_slots_are_stopped(states: str, ranks: tuple[int, ...], stopped: bool) -> None:
    assert is_stopped(tree(*states), ranks) is stopped
