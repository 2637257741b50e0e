"""The rank's side of being looked at: who may read it, and its answer to the signal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from beating_rank import run

from robust_slurm.looked import SIGNAL_FROM_LAST

PTRACER = """
import ctypes, os
import robust_slurm.looked as looked
said = []
class Libc:
    def prctl(self, option, pid, *rest):
        said.append((hex(option), pid.value, os.getpid()))
        return {result}
real = ctypes.CDLL
ctypes.CDLL = lambda name, *a, **k: Libc() if name is None else real(name, *a, **k)
looked.SCOPE = {scope!r}
r.beat(1); r.beat(2); looked.allow()
if os.fork() == 0:
    print("child", [(o, p, pid == os.getpid()) for o, p, pid in said[-1:]], flush=True)
    os._exit(0)
os.wait()
print("rank", [(o, p, pid == os.getpid()) for o, p, pid in said])
"""


@pytest.mark.parametrize("result", [0, -1])
def test_a_rank_and_its_children_name_robust_task(tmp_path: Path, result: int) -> None:
    """The rank names robust-task where Yama asks for it, whatever prctl returns."""
    (tmp_path / "scope").write_text("1\n")
    code = PTRACER.format(scope=str(tmp_path / "scope"), result=result)
    done = run(code, tmp_path, ROBUST_SHIM="77")
    assert done.stdout.splitlines() == [
        "child [('0x59616d61', 77, True)]",
        "rank [('0x59616d61', 77, True), ('0x59616d61', 77, True)]",
    ]
    assert done.stderr == ""


@pytest.mark.parametrize("scope", ["0", "2", "3", None])
def test_elsewhere_nothing_is_done(tmp_path: Path, scope: str | None) -> None:
    if scope is not None:
        (tmp_path / "scope").write_text(f"{scope}\n")
    code = PTRACER.format(scope=str(tmp_path / "scope"), result=0)
    done = run(code, tmp_path, ROBUST_SHIM="77")
    assert done.stdout.splitlines() == ["child []", "rank []"]


@pytest.mark.parametrize("shim", ["", "x", "-1"])
def test_a_strange_pid_of_robust_task_is_no_error(tmp_path: Path, shim: str) -> None:
    (tmp_path / "scope").write_text("1\n")
    code = f"import robust_slurm.looked as looked; looked.SCOPE = '{tmp_path}/scope'; r.beat(1)"
    assert run(code, tmp_path, ROBUST_SHIM=shim).stderr == ""


ANSWERS = """
import os, pathlib, signal, sys
{before}
r.beat(1)
os.kill(os.getpid(), {number})
print(*(p.read_text() for p in pathlib.Path(os.environ["ROBUST_BEAT_DIR"]).glob("stacks-*")))
"""


def test_it_answers_with_its_stacks(tmp_path: Path) -> None:
    number = signal.SIGRTMAX - SIGNAL_FROM_LAST
    done = run(ANSWERS.format(before="", number=number), tmp_path, ROBUST_SHIM="77")
    assert "in <module>" in done.stdout and "Stack (most recent" in done.stdout
    assert done.stderr == ""


def test_a_handler_of_the_program_stays(tmp_path: Path) -> None:
    number = signal.SIGRTMAX - SIGNAL_FROM_LAST
    before = f"signal.signal({number}, lambda *_: print('own'))"
    done = run(ANSWERS.format(before=before, number=number), tmp_path, ROBUST_SHIM="77")
    assert done.stdout.split() == ["own"]


def test_outside_robust_srun_nothing_is_registered(tmp_path: Path) -> None:
    run("r.beat(1)", tmp_path)
    assert not list(tmp_path.glob("*stacks*"))


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    code = "import robust_slurm.looked as looked; looked.answer('/proc/nowhere')"
    assert run(code, tmp_path, ROBUST_SHIM="77").stderr == ""
