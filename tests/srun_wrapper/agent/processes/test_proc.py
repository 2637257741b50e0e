"""Process trees, with real processes. Each test runs in a child of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from srun_wrapper.agent.processes import process_tree

# The shell starts two sleeps, one of them in a session of its own.
TREE = "sleep 60 & setsid sleep 60 & wait"


def wait(ready: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for a condition; raises TimeoutError."""
    deadline = time.monotonic() + seconds
    pause = 0.002
    while not ready():
        if time.monotonic() > deadline:
            raise TimeoutError
        signal.sigtimedwait([], pause)


def names(pids: list[int]) -> list[str]:
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/comm") as file:
                found.append(file.read().strip())
        except OSError:
            continue
    return sorted(found)


def alone(work: Callable[[], None]) -> None:
    """Run ``work`` in a process without other children."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException as err:
            os.write(2, f"in the child: {type(err).__name__}: {err}\n".encode())
            raise
        finally:
            process_tree.end_all(process_tree.descendants(os.getpid()))
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_descendants() -> None:
    def work() -> None:
        shell = subprocess.Popen(["sh", "-c", TREE])
        wait(lambda: names(process_tree.descendants(os.getpid())) == ["sh", "sleep", "sleep"])
        below = process_tree.descendants(os.getpid())
        assert below[0] == shell.pid
        assert sorted(process_tree.descendants(shell.pid)) == sorted(below[1:])
        assert process_tree.children(os.getpid()) == [shell.pid]
        assert process_tree._children_by_scan(os.getpid()) == [shell.pid]
        assert sorted(process_tree._children_by_scan(shell.pid)) == sorted(
            process_tree.children(shell.pid)
        )

    alone(work)


def test_a_process_that_is_gone_has_none() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(10)
    assert process_tree.children(gone.pid) == process_tree.descendants(gone.pid) == []
    assert process_tree.usage([gone.pid]).state == ""
    process_tree.send([gone.pid], signal.SIGTERM)
    process_tree.end_all([gone.pid])


def test_a_subreaper_gets_the_orphans_and_ends_them_all() -> None:
    def work() -> None:
        process_tree.become_subreaper()
        shell = subprocess.Popen(["sh", "-c", TREE])
        wait(lambda: len(process_tree.descendants(os.getpid())) == 3)
        os.kill(shell.pid, signal.SIGKILL)
        wait(lambda: shell.pid in process_tree.reap())
        # Both, whatever session they are in, are ours now.
        wait(lambda: names(process_tree.children(os.getpid())) == ["sleep", "sleep"])
        assert not process_tree.childless()
        process_tree.end_all(process_tree.descendants(os.getpid()))
        ended: dict[int, int] = {}

        def all_reaped() -> bool:
            ended.update(process_tree.reap())
            return len(ended) == 2

        wait(all_reaped)
        assert {os.waitstatus_to_exitcode(status) for status in ended.values()} == {-9}
        assert process_tree.childless() and process_tree.reap() == {}

    alone(work)


def test_commands_of_a_spared_thread_are_neither_ended_nor_reaped() -> None:
    """Slurm commands of the last duty bring the job back while the ranks of this node are ended."""

    def work() -> None:
        codes: list[int] = []

        def duty() -> None:
            process_tree.spared_thread = str(threading.get_native_id())
            codes.append(subprocess.Popen(["sh", "-c", "sleep 0.5; exit 7"]).wait())

        rank = subprocess.Popen(["sleep", "60"])
        thread = threading.Thread(target=duty)
        thread.start()
        wait(lambda: bool(process_tree.spared_thread))
        assert process_tree.children(os.getpid()) == [rank.pid]
        process_tree.end_all(process_tree.descendants(os.getpid()))
        ended: dict[int, int] = {}

        def over() -> bool:
            ended.update(process_tree.reap())
            return not thread.is_alive()

        wait(over)
        assert codes == [7] and list(ended) == [rank.pid]

    alone(work)


def test_an_unreaped_child_is_still_a_child() -> None:
    def work() -> None:
        assert process_tree.childless()
        child = subprocess.Popen(["true"])
        wait(lambda: process_tree.usage([child.pid]).state == "Z")
        assert not process_tree.childless()
        assert list(process_tree.reap()) == [child.pid]
        assert process_tree.childless()

    alone(work)


def test_die_with_parent() -> None:
    code = (
        "import os, signal, subprocess, sys\n"
        "from srun_wrapper.agent.processes import process_tree as proc\n"
        "child = subprocess.Popen(['sleep', '60'],"
        " preexec_fn=lambda: proc.die_with_parent(signal.SIGKILL))\n"
        "print(child.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    child = int(done.stdout)
    wait(lambda: process_tree.usage([child]).state in ("", "Z"))


def test_usage() -> None:
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        wait(lambda: process_tree.usage([busy.pid]).cpu > 0.05)
        assert process_tree.usage([busy.pid]).io > 0
        os.kill(busy.pid, signal.SIGSTOP)
        wait(lambda: process_tree.usage([busy.pid]).state == "T")
        assert process_tree.usage([os.getpid(), busy.pid]).state == "T"  # the most telling one
    finally:
        busy.kill()
        busy.wait(10)


@pytest.mark.parametrize(
    ("tasks", "pid_max", "threads_max", "said"),
    [
        (32700, 32768, 99999, "no process id left on this node (32700 tasks of 32768)"),
        (950, 32768, 1000, "no process id left on this node (950 tasks of 1000)"),
        (20000, 32768, 99999, ""),
    ],
)
def test_a_node_without_process_ids(
    tmp_path: Path, tasks: int, pid_max: int, threads_max: int, said: str
) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "loadavg").write_text(f"0.1 0.2 0.3 2/{tasks} 4711\n")
    (tmp_path / "sys/kernel/pid_max").write_text(f"{pid_max}\n")
    (tmp_path / "sys/kernel/threads-max").write_text(f"{threads_max}\n")
    assert process_tree.no_ids(str(tmp_path)) == said
    assert not process_tree.no_ids()
