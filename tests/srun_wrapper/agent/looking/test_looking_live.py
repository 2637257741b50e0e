"""A slot's processes as an inspection sees them: real processes, real py-spy, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from places import PROGRAMS
from slot_driver import Driver, drive, drivers
from waiting import until

from srun_wrapper.agent import filesystems
from srun_wrapper.agent.looking import kernel
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.protocol.looking_messages import LAUNCHER, LOADER, RANK, Look
from srun_wrapper.protocol.messages import Inspect, Inspected, SlotActivity

pytestmark = pytest.mark.slow

__all__ = ["drive", "drivers"]
SCRIPT = PROGRAMS / "looked_tree.py"


def looked(d: Driver, *names: str, token: int = 3) -> SlotActivity:
    """Inspect when the processes of these names are ready."""
    for name in names:
        d.wait((d.base / name).exists)
    d.order(Inspect(token, 0.05))
    return d.get(Inspected).samples[0]


def pid_of(d: Driver, name: str) -> int:
    return int((d.base / name).read_text())


def calls(look: Look) -> list[str]:
    return [frame.partition(" ")[0] for frame in look.main()]


ALL = ("rank-2", "rank-3", "loader-2", "loader-3")


def test_the_whole_tree_of_a_launcher(drive: Any, tmp_path: Path) -> None:
    d = drive("python3", str(SCRIPT), str(tmp_path))
    d.launch()
    sample = looked(d, *ALL)
    assert [(look.role, look.rank, look.local) for look in sample.looks] == [
        (RANK, 2, 0),
        (RANK, 3, 1),
        (LAUNCHER, 0, -1),
        *[(LOADER, n, n - 2) for n in sorted(look.rank for look in sample.looks[3:])],
    ]
    assert {look.pid for look in sample.looks if look.role == RANK} == {
        pid_of(d, "rank-2"),
        pid_of(d, "rank-3"),
    }
    for look in sample.looks:
        assert look.stacks and not look.failed, look
    first = sample.looks[0]
    assert calls(first) == ["all_reduce", "rank", "<module>"]
    assert [stack.thread for stack in first.stacks] == ["main", "helper"]
    assert "_worker_loop" in calls(sample.looks[-1])
    assert sample.stack == first.main() and not sample.moved
    d.order(Inspect(4, 0.0, False, quick=True))
    quick = d.get(Inspected).samples[0]
    assert [(look.role, look.rank, calls(look)) for look in quick.looks] == [
        (RANK, 2, calls(first)),
        (RANK, 3, calls(first)),
        (LAUNCHER, 0, []),
    ]


def test_a_stopped_rank_shows_its_stack(drive: Any, tmp_path: Path) -> None:
    d = drive("python3", str(SCRIPT), str(tmp_path), "rank")
    d.launch(rank=7)
    looked(d, "rank-7", "loader-7")
    os.kill(pid_of(d, "rank-7"), signal.SIGSTOP)
    d.wait(lambda: process_tree.usage([pid_of(d, "rank-7")]).state == "T")
    sample = looked(d, token=4)
    assert sample.state == "T"
    rank = next(look for look in sample.looks if look.role == RANK)
    assert rank.state == "T" and calls(rank)[0] == "all_reduce"


@pytest.fixture
def refused(tmp_path: Path) -> str:
    """A py-spy that may not read any process."""
    tool = tmp_path / "py-spy"
    tool.write_text("#!/bin/sh\necho Permission Denied >&2; exit 1\n")
    tool.chmod(0o755)
    return str(tool)


@pytest.mark.parametrize("name", ["rank-7", "loader-7"])
def test_where_py_spy_is_refused_the_process_answers_itself(
    drive: Any, tmp_path: Path, name: str, refused: str
) -> None:
    """A process that is forked from the rank answers in the rank's file."""
    d = drive("python3", str(SCRIPT), str(tmp_path), "rank", py_spy=refused)
    d.launch(rank=7)
    sample = looked(d, "rank-7", "loader-7")
    look = next(look for look in sample.looks if look.pid == pid_of(d, name))
    assert not look.failed
    wanted = "all_reduce" if name.startswith("rank") else "fetch"
    assert wanted in calls(look), look
    assert looked(d, token=4).looks  # and it lives


PATHS = "import os, sys; sys.path.insert(0, os.environ['PYTHONPATH'].split(':')[0]);"


def test_it_answers_while_it_holds_the_lock_of_the_interpreter(
    drive: Any, tmp_path: Path, refused: str
) -> None:
    code = (
        f"{PATHS}import collections, itertools, robust_slurm;robust_slurm.beat(1);"
        f"open('{tmp_path}/held','w').close();collections.deque(itertools.repeat(0), maxlen=0)"
    )
    d = drive("python3", "-c", code, py_spy=refused)
    d.launch()
    (look,) = looked(d, "held").looks
    assert calls(look) == ["<module>"] and look.state == "R"


def test_a_program_with_its_own_handler_is_not_sent_the_signal(
    drive: Any, tmp_path: Path, refused: str
) -> None:
    code = (
        f"{PATHS}import signal, time;"
        "signal.signal(signal.SIGRTMAX - 5, lambda *_: os._exit(9));"
        "import robust_slurm;robust_slurm.beat(1);"
        f"open('{tmp_path}/own','w').close();time.sleep(600)"
    )
    d = drive("python3", "-c", code, py_spy=refused)
    d.launch()
    sample = looked(d, "own")
    assert [look.failed for look in sample.looks] == ["py-spy was refused: no permission"]
    assert looked(d, token=4).state == "S"


def test_the_file_that_a_real_process_waits_for(tmp_path: Path) -> None:
    """A pipe with a name stands in for a file of a server that does not answer."""
    os.mkfifo(tmp_path / "data")
    inner = ("sh", "-c", "read line < data")
    for words, call in ((("cat", str(tmp_path / "data")), "by path"), (inner, "relative")):
        with subprocess.Popen(words, cwd=tmp_path) as process:
            try:
                until(lambda: kernel.waited_file(process.pid), f"it waits, {call}", 5)
                found = kernel.waited_file(process.pid)
            finally:
                process.kill()
        assert found == str(tmp_path / "data"), call
    assert filesystems.point_of(os.getpid(), "/proc/self/x") == "/proc"
    assert kernel.waited_file(os.getpid()) == "", "it runs"


def test_a_program_that_writes_is_not_sent_the_signal(
    drive: Any, tmp_path: Path, refused: str
) -> None:
    """The signal would end its write() early, and many programs do not write the rest."""
    code = (
        f"{PATHS}import threading, time, robust_slurm;robust_slurm.beat(1);r, w = os.pipe()\n"
        "def read():\n"
        f"    while not os.path.exists('{tmp_path}/go'): time.sleep(0.01)\n"
        "    while os.read(r, 1 << 20): pass\n"
        "threading.Thread(target=read, daemon=True).start()\n"
        f"print(os.getpid(), file=open('{tmp_path}/writes', 'w'), flush=True)\n"
        "n = os.write(w, bytes(1 << 20))\n"
        f"open('{tmp_path}/wrote', 'w').write(str(n)); time.sleep(600)"
    )
    d = drive("python3", "-c", code, py_spy=refused)
    d.launch()
    pid = tmp_path / "writes"
    d.wait(lambda: pid.exists() and pid.read_text() and kernel.is_writing(int(pid.read_text())))
    sample = looked(d)
    assert [look.failed for look in sample.looks] == ["py-spy was refused: no permission"]
    (tmp_path / "go").touch()
    d.wait(lambda: (tmp_path / "wrote").exists() and (tmp_path / "wrote").read_text() != "")
    assert (tmp_path / "wrote").read_text() == str(1 << 20)
