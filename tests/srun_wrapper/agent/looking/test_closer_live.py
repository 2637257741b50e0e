"""Real processes: torch's flight recorder over gloo, killed children, output that drains."""

from __future__ import annotations

import os
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
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.locate.collectives import MISMATCH, MISSING, OLD, findings
from srun_wrapper.protocol.closer_messages import LookCloser, LookedCloser

pytestmark = pytest.mark.slow

__all__ = ["drive", "drivers"]


def looked(d: Driver) -> LookedCloser:
    d.order(LookCloser(3))
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


WAITS = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
ended = subprocess.Popen(["false"])
print(worker.pid, flush=True)
os.kill(worker.pid, signal.SIGKILL)
time.sleep(600)
"""


def test_a_killed_child_for_which_nobody_waits_is_shown(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WAITS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        text = f"killed and not waited for: its child {worker} (sleep) by SIGKILL"
        until(lambda: kernel.killed_children(process.pid) == text, text)
        seen = sampler.sample(0, process.pid, 1, [process.pid], 0.0, 1 << 16, tmp_path, False)
        assert [look.kernel for look in seen.looks] == [text]
        process.kill()
    assert kernel.killed_children(process.pid) == ""


WRITES = "import os, sys; sys.exit(os.write(1, b'x' * (1 << 20)) != 1 << 20)"


def test_a_look_cuts_no_write_short(tmp_path: Path) -> None:
    """A process that is stopped in write() gets back how much it has written so far."""
    with subprocess.Popen([sys.executable, "-c", WRITES], stdout=subprocess.PIPE) as process:
        until(lambda: kernel.is_writing(process.pid), "the write")
        assert process.stdout is not None
        for _ in range(8):
            seen = sampler.sample(0, process.pid, 1, [process.pid], 0.0, 1 << 16, tmp_path, True)
            assert [look.failed for look in seen.looks] == [""]
            os.read(process.stdout.fileno(), 1 << 12)
        left = (1 << 20) - 8 * (1 << 12)
        assert len(process.stdout.read()) == left
    assert process.returncode == 0
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
