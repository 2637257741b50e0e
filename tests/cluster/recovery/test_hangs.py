"""Ranks that stand still, and others that only seem to."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import LabFactory
from jobs import TOY, Training, prepared, start
from places import PROGRAMS

from lab import Cluster

# Ranks are looked at after ten times the longest time between two reports with a step, and at least
# the floor.
LOOKS = "--robust-hang-floor=2 --robust-interval=0.2"
QUICK_HANG = f"{LOOKS} --robust-hang-limit=4"


def test_stopped_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault stop --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart", suspects=[])
    assert record["phases"]["detect"] > 1.5
    assert any("rank 1 is stopped" in line for line in record["evidence"])
    assert not training.accusations()  # no machine stops a process


def test_sleeping_rank_is_a_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault sleep --at 25", robust=QUICK_HANG)
    training.check_done()
    record = training.only_incident(symptom="hang", action="restart")
    assert any("no rank did anything" in line for line in record["evidence"])


@pytest.mark.parametrize(
    "toy",
    ["--fault phase --at 25", "--fault busy --at 25", "--fault pause --at 1"],
    ids=["phase", "unmarked evaluation", "slow first step"],
)
def test_no_false_alarm(lab: Cluster, toy: str) -> None:
    training = start(lab, 2, 2, toy=f"{toy} --seconds 5", robust=QUICK_HANG, steps=35)
    training.check_done()
    assert not training.incidents()
    assert training.rosters()[-1]["epoch"] == 1


def test_ranks_that_end_some_seconds_apart_are_no_hang(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault linger --rank 3 --seconds 8", robust=QUICK_HANG)
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_commands_that_outlive_their_training_are_no_hang(lab: Cluster) -> None:
    """A shell uploads when its program has ended well; torchrun waits for its other ranks."""
    training = prepared(lab, 2)
    script = training.dir / "run.sh"
    words = f"python {TOY} --dir {training.dir} --steps {training.steps}"
    script.write_text(f"{words} || exit 1\nsleep 8\n")
    training.submit(f"robust-srun {QUICK_HANG} bash {script}", ["-N2", "--ntasks-per-node=1"])
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


@pytest.mark.parametrize("rank", [-1, 0], ids=["all ranks", "rank 0 alone"])
def test_an_idle_wait_is_only_looked_at(lab: Cluster, rank: int) -> None:
    """A slow object store, a lock, a retry: with default limits nothing is done for minutes."""
    toy = f"--fault pause --seconds 14 --at 25 --rank {rank}"
    training = start(lab, 2, 1, toy=toy)
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_the_same_stall_after_a_restart_is_the_programs_own(new_lab: LabFactory) -> None:
    """A wait of 12 s at step 25, each time: with a limit of 4 s it costs one restart, no more."""
    lab = new_lab(3)
    toy = "--fault pause --seconds 12 --at 25 --epoch 0 --node n1 --rank 0"
    training = start(lab, 2, 1, spares=1, toy=toy, robust=QUICK_HANG)
    training.check_done()
    training.only_incident(symptom="hang", action="restart", swaps=[])
    again = r"training waits at step 25 as before its last restart: waiting up to 16 s"
    assert len(re.findall(again, training.out())) == 1
    assert not training.accusations()


def test_a_rank_that_stops_itself_again_and_again_costs_no_node(new_lab: LabFactory) -> None:
    lab = new_lab(3)
    toy = "--fault stop --at 25 --epoch 1,2 --node n2 --rank 1 --save 100"  # back to step 1
    training = start(lab, 2, 1, spares=1, toy=toy, robust=QUICK_HANG)
    training.check_done()
    assert [(i["action"], i["swaps"]) for i in training.incidents()] == [("restart", [])] * 2
    assert not training.accusations()


@contextlib.contextmanager
def traced(training: Training, rank: int, node: str) -> Iterator[None]:
    """Attach a debugger to a rank, which stands still until it detaches."""
    (process,) = training.processes(str(TOY), rank)
    status = Path(f"/proc/{process.pid}/status").read_text()
    (pid,) = re.findall(r"^NSpid:.*\s(\d+)$", status, re.MULTILINE)  # in the node
    argv = [sys.executable, str(PROGRAMS / "tracer.py"), pid]
    pipe = subprocess.PIPE
    with training.lab.popen(node, argv, stdin=pipe, stdout=pipe, text=True) as tracer:
        assert tracer.stdout is not None and tracer.stdin is not None
        assert tracer.stdout.readline() == "attached\n"
        yield
        tracer.stdin.close()
        assert tracer.wait(10) == 0


def test_a_debugger_suspends_all_limits(lab: Cluster) -> None:
    training = start(lab, 2, 1, toy="--hold 20", robust=QUICK_HANG)
    training.wait_step(20)
    with traced(training, 1, "n2"):
        training.go_on()
        said = r"python\w* \(pid \d+\) traces rank 1 on n2: no limit counts until it detaches"
        training.wait_says(said)
        training.until(lambda: silent_for(training) > 9, "9 s without a step")
    training.check_done()
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1


def test_a_killed_rank_that_a_debugger_holds_costs_no_node(new_lab: LabFactory) -> None:
    """The killed rank stays a zombie that the debugger alone can reap."""
    lab = new_lab(3)
    training = start(lab, 2, 1, spares=1, toy="--hold 20", robust=QUICK_HANG)
    training.wait_step(20)
    with traced(training, 1, "n2"):
        training.go_on()
        training.kill(str(TOY), rank=0)
        training.check_done()
    training.only_incident(symptom="crash", action="restart", swaps=[])
    assert not training.accusations()


def silent_for(training: Training) -> float:
    """Return the seconds since the output's last line."""
    return time.time() - (training.dir / "out").stat().st_mtime


READS = "head -c 20000000 /dev/zero | {} bash -c 'cat > /dev/null; exec {}'"  # more than is kept


@pytest.mark.parametrize(
    ("option", "why"),
    [("--mpi=pmi2", "--mpi=pmi2: an MPI world cannot be"), ("", "stdin that a rank has read is")],
    ids=["an MPI world", "input that is used up"],
)
def test_ranks_that_cannot_be_started_again_wait_as_under_srun(
    lab: Cluster, option: str, why: str
) -> None:
    """The wait is longer than the limit for hangs: it is printed, and robust-status shows it."""
    training = prepared(lab, 2)
    toy = "--fault pause --seconds 14 --at 25"
    line = training.line([*QUICK_HANG.split(), *option.split()], toy.split())
    launcher, _, program = line.partition(" python ")
    body = line if option else READS.format(launcher, f"python {program}")
    training.submit(body, ["-N2", "--ntasks-per-node=1"])
    left = rf"no step for [\d.]+ s: no rank did anything for \d+ s; nothing is done: {why}"
    training.wait_says(f"^robust-srun: {left}")
    shown = ["robust-status", "--state-dir", str(training.state), str(training.job)]
    training.until(lambda: re.search(left, unwrapped(lab, shown)), "the wait in robust-status", 15)
    training.check_done()
    assert len(re.findall(left, training.out())) == 1
    assert not training.incidents() and training.rosters()[-1]["epoch"] == 1
    assert "no step for" not in unwrapped(lab, shown)


def unwrapped(lab: Cluster, command: list[str]) -> str:
    """Return the output of a command as one line."""
    return " ".join(lab.exec("head", command).stdout.split())
