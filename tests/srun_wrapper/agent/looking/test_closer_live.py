"""The closer look at real processes: torch's flight recorder over gloo, py-spy, the kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from places import PROGRAMS
from slot_driver import Driver, drive, drivers
from waiting import until

from srun_wrapper.agent.looking import kernel, sampler
from srun_wrapper.agent.looking.closer import in_depth
from srun_wrapper.agent.looking.native import NativeReader
from srun_wrapper.agent.looking.roles import TreeProcess
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.locate.collectives import MISMATCH, MISSING, OLD, findings
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser
from srun_wrapper.protocol.messages import Inspect, Inspected

pytestmark = pytest.mark.slow

__all__ = ["drive", "drivers"]


def looked(d: Driver, *pids: int, token: int = 3) -> LookedCloser:
    d.order(LookCloser(token, pids))
    return d.get(LookedCloser)


@pytest.mark.parametrize(
    ("mode", "world", "kind", "text"),
    [
        ("skip", 2, MISSING, "rank 1 has not entered all_reduce #4 of group 0 (default_pg); "
                             "rank 0 has waited in it for "),
        ("size", 4, MISMATCH, "rank 1 calls all_reduce of 4 (Float), ranks 0,2-3 call all_reduce "
                              "of 8 (Float) in collective #4 of group 0 (default_pg): "),
    ],
    ids=["skip", "size"],
)  # fmt: skip
def test_the_flight_recorder_over_gloo(
    drive: Any, tmp_path: Path, mode: str, world: int, kind: str, text: str
) -> None:
    pytest.importorskip("torch")
    script = str(PROGRAMS / "gloo_parted.py")
    d = drive(sys.executable, script, mode, str(world), str(tmp_path))
    d.launch()
    d.wait(lambda: all((tmp_path / f"ready-{n}").exists() for n in range(world)), 60.0)
    end = time.monotonic() + OLD + 5.0
    while True:  # until the others have waited long enough
        seen = looked(d).recorded
        found = findings(seen, range(world))
        if found or time.monotonic() > end:
            break
    assert [finding.kind for finding in found] == [kind], (seen, found)
    assert found[0].text.startswith(text), found


SCRIPT = PROGRAMS / "looked_tree.py"


def ranked(drive: Any, tmp_path: Path, **options: Any) -> tuple[Driver, int]:
    """A rank in all_reduce, and its pid."""
    d = drive(sys.executable, str(SCRIPT), str(tmp_path), "rank", **options)
    d.launch(rank=7)
    d.wait((tmp_path / "rank-7").exists)
    return d, int((tmp_path / "rank-7").read_text())


def test_a_native_stack_and_the_kernel(drive: Any, tmp_path: Path) -> None:
    d, pid = ranked(drive, tmp_path)
    (seen,) = looked(d, pid).processes
    assert (seen.pid, seen.python, seen.failed) == (pid, True, "")
    python = [frame for frame in seen.native if frame.startswith("all_reduce (looked_tree.py:")]
    assert python and seen.native.index(python[0]) > 0, seen  # native frames are inside it
    assert any(".so" in frame for frame in seen.native[: seen.native.index(python[0])]), seen
    assert seen.kernel.startswith("state S"), seen


WAITS = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
ended = subprocess.Popen(["false"])
print(worker.pid, flush=True)
os.kill(worker.pid, signal.SIGKILL)
time.sleep(600)
"""


def test_a_killed_child_for_which_nobody_waits_is_shown() -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        text = f"killed and not waited for: its child {worker} (sleep) by SIGKILL"
        until(lambda: kernel.killed_children(process.pid) == text, text)
        member = TreeProcess(process.pid, 1, "S", False)
        (seen,) = in_depth([member], [process.pid], NativeReader())
        assert seen.kernel.startswith("state S in ") and seen.kernel.endswith(f"; {text}")
        process.kill()
    assert kernel.killed_children(process.pid) == ""


WRITES = "import os, sys; sys.exit(os.write(1, b'x' * (1 << 20)) != 1 << 20)"


def test_a_write_is_not_cut_short(tmp_path: Path) -> None:
    """A process that is stopped in write() gets back how much it has written so far."""
    with subprocess.Popen([sys.executable, "-c", WRITES], stdout=subprocess.PIPE) as process:
        until(lambda: kernel.is_writing(process.pid), "the write")
        seen = NativeReader().read(process.pid)
        assert process.stdout is not None and len(process.stdout.read()) == 1 << 20
    assert process.returncode == 0
    assert (seen.frames, seen.failed) == ((), "it is writing, and must not be stopped in that")
    assert not kernel.is_writing(os.getpid()) and not kernel.is_writing(1 << 23)


BIG = "import os; os.write(1, b'x' * (64 << 20))"


@pytest.mark.parametrize("drains", [True, False])
def test_output_that_drains_is_a_sign_of_work(tmp_path: Path, drains: bool) -> None:
    """One write() of much counts in /proc/PID/io at its end only."""
    with subprocess.Popen([sys.executable, "-c", BIG], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        until(lambda: kernel.is_writing(process.pid), "the write")
        over = threading.Event()

        def drain() -> None:
            while not over.wait(0.02):
                os.read(process.stdout.fileno(), 1 << 16)

        reader = threading.Thread(target=drain)
        if drains:
            reader.start()
        before = process_tree.usage([process.pid])
        pids = [process.pid]
        seen = sampler.sample(0, process.pid, 1, pids, 1.0, 1 << 16, tmp_path, False)
        assert process_tree.usage([process.pid]).io == before.io
        over.set()
        process.kill()
    if drains:
        reader.join()
    assert (seen.io > 8 << 10) is drains, seen


def test_only_processes_of_the_slot_and_no_stopped_ones(drive: Any, tmp_path: Path) -> None:
    d, pid = ranked(drive, tmp_path)
    assert looked(d, os.getpid()).processes == ()
    os.kill(pid, signal.SIGSTOP)
    d.wait(lambda: process_tree.usage([pid]).state == "T")
    (seen,) = looked(d, pid, token=4).processes
    assert (seen.native, seen.failed) == ((), "one of its threads is stopped or waits for a device")
    assert seen.kernel.startswith("state T"), seen


def test_everything_else_cancels_it_and_the_process_goes_on(drive: Any, tmp_path: Path) -> None:
    """An inspection finds it running, not stopped, although py-spy was in the midst of it."""
    slow = tmp_path / "py-spy"  # the plain look is quick, the native one never ends
    slow.write_text(
        "#!/bin/sh\ncase $* in *--native*) touch $0.begun; exec sleep 60;; esac\nexit 1\n"
    )
    slow.chmod(0o755)
    d, pid = ranked(drive, tmp_path, py_spy=str(slow))
    d.order(LookCloser(3, (pid,)))
    d.wait((tmp_path / "py-spy.begun").exists)
    began = time.monotonic()
    d.order(Inspect(4, 0.05, False))
    assert d.get(Inspected).samples[0].state == "S"
    (seen,) = [e for e in d.events if isinstance(e, LookedCloser)] or [d.get(LookedCloser)]
    assert time.monotonic() - began < 20.0  # and py-spy would take 60
    assert [p.native for p in seen.processes] == [()]
    d.order(LookCloser(5, (pid,)))  # and a stop does not wait for it
    began = time.monotonic()
    d.start(2)
    d.launch(3, rank=7)
    assert time.monotonic() - began < 20.0


def test_a_command_that_is_no_python_is_shown_by_the_kernel(drive: Any, tmp_path: Path) -> None:
    d = drive("/bin/sh", "-c", f"exec 3<{tmp_path}; touch {tmp_path}/up; sleep 600; true")
    d.launch()
    d.wait((tmp_path / "up").exists)
    until = time.monotonic() + 10.0
    (seen,) = looked(d).processes
    while not seen.kernel.startswith("state S") and time.monotonic() < until:
        (seen,) = looked(d).processes  # the shell has yet to wait for its last command
    assert not seen.python and seen.native == () and seen.failed == ""
    assert seen.kernel.startswith("state S"), seen


def test_the_file_of_a_system_call(tmp_path: Path) -> None:
    task = tmp_path / "7" / "fd"
    task.mkdir(parents=True)
    stat = "7 (a b) D 1 " + "0 " * 48
    (tmp_path / "7" / "stat").write_text(stat)
    (tmp_path / "7" / "wchan").write_text("nfs_wait_bit_killable")
    number = next(n for n, name in kernel.CALLS.items() if name == "read")
    (tmp_path / "7" / "syscall").write_text(f"{number} 0x3 0x7f 0x1000 0x0 0x0 0x0 0x7ff 0x7f1")
    (task / "3").symlink_to("/data/shard-3")
    assert kernel.facts(7, tmp_path) == "state D in nfs_wait_bit_killable, read of /data/shard-3"
    (tmp_path / "7" / "syscall").unlink()  # refused
    (tmp_path / "7" / "wchan").write_text("0")
    assert kernel.facts(7, tmp_path) == "state D"
    assert kernel.facts(8, tmp_path) == ""
