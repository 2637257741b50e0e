"""The guardian of a shim: started once more after a death, the same end as the shim otherwise."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import until

from robust_slurm import process_stat

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from srun_wrapper.agent.processes import guardian
from srun_wrapper.agent.task import end_like
guardian.STEADY, guardian.STOPPED = float(sys.argv[1]), float(sys.argv[2])
base, plan = Path(sys.argv[3]), sys.argv[4:]

def life(number):
    (base / f"life-{number}").write_text(str(os.getpid()))
    todo = plan[min(number, len(plan) - 1)]
    kind, _, value = todo.partition(":")
    if kind == "end":
        code, _, signum = value.partition(",")
        return int(code), int(signum or 0)
    if kind == "restart":
        raise guardian.Restart
    if kind == "raise":
        raise RuntimeError("a slip of ours")
    if kind == "wait":
        signal.signal(signal.SIGTERM, lambda *_: (base / "term").touch())
        (base / "ready").touch()
        while not (base / "term").exists():
            time.sleep(0.01)
        return 7, 0
    if kind == "leave":  # a rank that ignores signals and the death of its parent
        if os.fork() == 0:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            (base / "left").write_text(str(os.getpid()))
            time.sleep(100)
        while not (base / "left").exists():
            time.sleep(0.01)
    os.kill(os.getpid(), int(value or signal.SIGKILL))

guardian.guarded(life, end_like, "n1: the robust-task of local task 0")
"""


class Ran:
    def __init__(
        self, base: Path, *plan: str, steady: float = 300.0, stopped: float = 300.0
    ) -> None:
        words = [sys.executable, "-c", PROGRAM, str(steady), str(stopped), str(base), *plan]
        self.process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
        self.base = base

    def end(self) -> tuple[int, str]:
        err = self.process.communicate(timeout=20)[1]
        return self.process.returncode, err

    @property
    def lives(self) -> int:
        return len(list(self.base.glob("life-*")))


def held_back(pid: int, number: int) -> bool:
    """Return True if a signal has come and is blocked; one only pending may yet be delivered."""
    rows = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    status = dict(row.split(":\t", 1) for row in rows)
    return all(int(status[mask], 16) & (1 << (number - 1)) for mask in ("ShdPnd", "SigBlk"))


@pytest.mark.parametrize(
    ("plan", "code", "lives"),
    [
        (["end:0"], 0, 1),
        (["end:3"], 3, 1),
        (["end:0,9"], -signal.SIGKILL, 1),  # as its rank has ended
        (["end:0,15"], -signal.SIGTERM, 1),
        (["kill", "end:0"], 0, 2),
        (["kill:36", "end:0"], 0, 2),  # a real-time signal, which Python has no name for
        (["raise", "end:5"], 5, 2),
        (["kill", "kill", "end:0"], -signal.SIGKILL, 2),
        (["kill", "raise", "end:0"], 1, 2),
        (["restart", "restart", "kill", "end:0"], 0, 4),  # the agent's deaths are the agent's
        (["leave", "end:0"], 0, 2),
    ],
)
def test_it_ends_as_the_shim_ends(tmp_path: Path, plan: list[str], code: int, lives: int) -> None:
    ran = Ran(tmp_path, *plan)
    got, err = ran.end()
    assert (got, ran.lives) == (code, lives), err
    assert err.count("; restarting it") == len(
        [word for word in plan[: lives - 1] if word != "restart"]
    )
    assert ("a slip of ours" in err) == ("raise" in plan)
    if "leave" in plan:  # nothing is left of the shim that died
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / "left").read_text()), 0)


def test_once_in_a_while_it_is_started_once_more_again(tmp_path: Path) -> None:
    assert Ran(tmp_path, "kill", "kill", "end:4", steady=0.0).end()[0] == 4


def test_signals_are_for_the_shim(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "kill", "wait")
    until((tmp_path / "ready").exists, "the shim")
    ran.process.send_signal(signal.SIGTERM)
    until(lambda: held_back(ran.process.pid, signal.SIGTERM), "the signal, held back", 5)
    assert ran.process.poll() is None
    assert (Path("/proc") / str(ran.process.pid) / "comm").read_text() == "robust-guard\n"
    shim = int((tmp_path / "life-1").read_text())
    assert (Path("/proc") / str(shim) / "comm").read_text() != "robust-guard\n"
    os.kill(shim, signal.SIGTERM)
    assert ran.end()[0] == 7


@pytest.mark.parametrize("then", ["nothing", "continued", "killed"])
def test_a_shim_that_stays_stopped_is_continued(tmp_path: Path, then: str) -> None:
    ran = Ran(tmp_path, "wait", "end:7", stopped=0.5 if then == "nothing" else 300.0)
    until((tmp_path / "ready").exists, "the shim")
    shim = int((tmp_path / "life-0").read_text())
    os.kill(shim, signal.SIGSTOP)
    until(lambda: process_stat.read(shim).state == "T", "the stop")
    if then == "continued":
        os.kill(shim, signal.SIGCONT)
    until(lambda: then == "killed" or process_stat.read(shim).state != "T", "the end of the stop")
    os.kill(shim, signal.SIGKILL if then == "killed" else signal.SIGTERM)
    code, err = ran.end()
    assert (code, ran.lives) == (7, 1 + (then == "killed"))
    told = "n1: the robust-task of local task 0 was stopped for 0.5 s (SIGSTOP); continuing it"
    assert (told in err) is (then == "nothing")


def test_the_shim_dies_with_its_guardian(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "wait")
    until((tmp_path / "ready").exists, "the shim")
    shim = int((tmp_path / "life-0").read_text())
    fd = os.pidfd_open(shim)
    ran.process.kill()
    ran.end()
    assert select.select([fd], [], [], 10.0)[0]
    os.close(fd)
