"""robust-srun beside srun in one allocation: what signals, scancel and the time limit do."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from allocation import DEADLINE, NODES, TOOLS, Allocation, allocate, parity_lab
from conftest import LabFactory
from holds import SECOND_COPY
from jobs import command_line, prepared, start
from waiting import until

from lab import Cluster
from lab.keeper.ranks import scan


@pytest.fixture(scope="module")
def lab() -> Iterator[Cluster]:
    with parity_lab() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def timed(lab: Cluster) -> dict[str, tuple[int, Path]]:
    """Per tool a job that meets its time limit, of a minute, while the other tests run."""
    found = {}
    for tool in TOOLS:
        cwd = lab.shared / f"timed-{tool}"
        cwd.mkdir()
        os.chown(cwd, lab.uid, lab.uid)
        (cwd / "count.py").write_text(_COUNT)
        script = f"#!/bin/bash\nexport ROBUST_STATE_DIR=state\n{tool} -n2 python count.py\n"
        options = ["-N1", "-n2", "-w", f"n{NODES + 1}", "--time=1", "-D", str(cwd)]
        found[tool] = (lab.sbatch(script, options), cwd)
    return found


@pytest.fixture(scope="module")
def alloc(lab: Cluster, timed: object) -> Allocation:
    return allocate(lab)


_COUNT = """
import os, signal, time
rank = os.environ["SLURM_PROCID"]
def got(number, frame):
    with open("got." + rank, "a") as file:
        print(signal.Signals(number).name, file=file)
for name in ("INT", "TERM", "USR1", "USR2", "HUP", "QUIT", "ALRM"):
    signal.signal(getattr(signal, "SIG" + name), got)
with open("ready." + rank, "w"):
    pass
end = time.monotonic() + 300
while not os.path.exists("end") and time.monotonic() < end:
    time.sleep(0.02)
"""


def counted(alloc: Allocation, tool: str, send: Callable[..., None]) -> tuple[int, list[str]]:
    """Exit code of the tool, and all signals that each of 3 ranks got."""
    cwd = alloc.directory(tool)
    argv = [tool, "-n3", "--robust-max-restarts=0"] if tool != "srun" else [tool, "-n3"]
    with alloc.start([*argv, "python", "-c", _COUNT], cwd) as process:
        until(lambda: len(list(cwd.glob("ready.*"))) == 3, "ranks", DEADLINE)
        send(process, alloc.step_of(process))
        until(lambda: len(list(cwd.glob("got.*"))) == 3, "signal", DEADLINE)
        time.sleep(SECOND_COPY)
        (cwd / "end").touch()
        code = process.wait(DEADLINE)
    return code, [path.read_text().strip() for path in sorted(cwd.glob("got.*"))]


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_signal_to_the_launcher_reaches_every_rank_once(alloc: Allocation, name: str) -> None:
    number = getattr(signal, f"SIG{name}")
    found = [counted(alloc, tool, lambda p, _s: p.send_signal(number)) for tool in TOOLS]
    assert found[1] == found[0]
    assert found[1][1] == [f"SIG{name}"] * 3


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT"])
def test_last_words(alloc: Allocation, name: str) -> None:
    """srun kills the ranks at once, or at the second Ctrl-C; here they are told, and may save."""
    number = getattr(signal, f"SIG{name}")
    code, got = counted(alloc, TOOLS[1], lambda p, _s: p.send_signal(number))
    assert code == 0
    assert got == [f"SIG{name}"] * 3


@pytest.mark.parametrize("name", ["USR2", "TERM", "INT"])
def test_scancel_signal_reaches_every_rank_once(alloc: Allocation, name: str) -> None:
    def send(_process: object, step: str) -> None:
        alloc.lab.exec("head", ["scancel", "-s", name, step], check=True)

    found = [counted(alloc, tool, send) for tool in TOOLS]
    assert found[1] == found[0]
    assert found[1][1] == [f"SIG{name}"] * 3


Send = Callable[["subprocess.Popen[bytes]", Path], object]


def ended(alloc: Allocation, tool: str, send: Send) -> int:
    """Exit code of the tool, whose stderr is in the file that ``send`` is given."""
    cwd = alloc.directory(tool)
    # Slurm tells the whole process tree of a task, and a shell that waits for a child lives on.
    command = [tool, "-n3", "bash", "-c", "exec sleep 100"]
    with (cwd / "err").open("wb") as err, alloc.start(command, cwd, stderr=err) as process:
        until(lambda: sleeping(cwd) == 3, "ranks", DEADLINE)
        send(process, cwd / "err")
        return process.wait(DEADLINE)


def sleeping(cwd: Path) -> int:
    """Return the number of ranks of ``ended`` that run there."""
    return sum(
        process.environ.get("PWD") == str(cwd) and command_line(process.pid) == "sleep 100 "
        for process in scan()
    )


@pytest.mark.parametrize("signals", [["USR1"], ["INT"] * 2, ["TERM"], ["HUP"]], ids=" ".join)
def test_exit_code_after_signals_to_the_launcher(alloc: Allocation, signals: list[str]) -> None:
    def send(process: "subprocess.Popen[bytes]", err: Path) -> None:
        for i, name in enumerate(signals):
            if i:  # the one before was taken: srun says so, the ranks of robust-srun end of it
                said = "answer to the first signal"
                until(
                    lambda: b"interrupt" in err.read_bytes() or not sleeping(err.parent), said, 10
                )
            process.send_signal(getattr(signal, f"SIG{name}"))

    plain, robust = [ended(alloc, tool, send) for tool in TOOLS]
    number = int(getattr(signal, f"SIG{signals[0]}"))
    assert robust == 128 + number
    assert plain in (robust, 128 + signal.SIGKILL)  # srun kills where we pass the signal on


@pytest.mark.parametrize("options", [[], ["-s", "TERM"], ["-s", "USR2"], ["-s", "KILL"]], ids=str)
def test_exit_code_of_a_cancelled_step(alloc: Allocation, options: list[str]) -> None:
    def cancel(process: "subprocess.Popen[bytes]", _err: Path) -> None:
        step = alloc.step_of(process)
        alloc.lab.exec("head", ["scancel", *options, step], check=True)

    codes = [ended(alloc, tool, cancel) for tool in TOOLS]
    assert codes[1] == codes[0] != 0
    assert alloc.lab.job(alloc.job)["JobState"] == "RUNNING"  # not put back in the queue


@pytest.mark.parametrize("options", [[], ["-s", "TERM"]], ids=str)
def test_step_cancelled_after_a_swap_stays_cancelled(
    new_lab: LabFactory, options: list[str]
) -> None:
    """The standby node's step is another one to Slurm: it ends with the first."""
    lab = new_lab(nodes=2, standby=1)
    training = start(lab, 2, steps=3000)
    training.wait_step(5)
    lab.crash("n2")
    training.until(lambda: training.incidents(), "the recovery")
    # From 24.11 scancel fails with a signal that did not reach the crashed node, too.
    lab.exec("head", ["scancel", *options, f"{training.job}.0"])
    assert training.wait_end(20) == 128 + (signal.SIGTERM if options else signal.SIGKILL)
    assert lab.job(training.job)["JobState"] == "FAILED"  # of that code, not put back
    assert len(training.incidents()) == 1
    training.check_gone()
    until(lambda: lab.nodes()["s1"] == {"IDLE"}, "the standby node has gone home")


def test_signal_after_a_swap_reaches_every_rank_once(new_lab: LabFactory) -> None:
    """The standby node's ranks get it from robust-srun, who hears of it from Slurm."""
    lab = new_lab(nodes=2)
    training = prepared(lab, 4)
    (training.dir / "count.py").write_text(_COUNT)

    def all_have(name: str) -> bool:
        return len(list(training.dir.glob(f"{name}.*"))) == 4

    line = "robust-srun --robust-stop-grace=0 python count.py"
    training.submit(line, ["-N2", "--ntasks-per-node=2"])
    training.until(lambda: all_have("ready"), "ranks")
    for path in training.dir.glob("ready.*"):
        path.unlink()
    lab.crash("n2")
    training.until(lambda: all_have("ready"), "ranks after the swap")
    lab.exec("head", ["scancel", "-s", "USR2", f"{training.job}.0"])  # fails from 24.11
    training.until(lambda: all_have("got"), "signal")
    time.sleep(SECOND_COPY)
    (training.dir / "end").touch()
    assert training.wait_end() == 0, training.story()
    got = [path.read_text().split() for path in training.dir.glob("got.*")]
    assert got == [["SIGUSR2"]] * 4


def test_second_interrupt_ends_ranks_that_ignore_it(alloc: Allocation) -> None:
    stubborn = (
        "trap 'touch got.$SLURM_PROCID' INT TERM; touch ready.$SLURM_PROCID; "
        "while :; do sleep 0.1; done"
    )
    cwd = alloc.directory("stubborn")
    with alloc.start(["robust-srun", "-n3", "bash", "-c", stubborn], cwd) as process:
        until(lambda: len(list(cwd.glob("ready.*"))) == 3, "ranks", DEADLINE)
        process.send_signal(signal.SIGINT)
        until(lambda: len(list(cwd.glob("got.*"))) == 3, "first interrupt", DEADLINE)
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE) in (128 + signal.SIGINT, 128 + signal.SIGKILL)


def test_time_limit(lab: Cluster, timed: dict[str, tuple[int, Path]]) -> None:
    """The ranks get Slurm's SIGTERM once, then its SIGKILL; nothing is restarted."""
    seen = []
    for job, cwd in timed.values():
        record = lab.wait_job(job, {"TIMEOUT", "COMPLETED", "FAILED", "CANCELLED"}, 150)
        # Slurm ends the batch script by SIGTERM too, so what runs in it may pass on a second one.
        got = [set(path.read_text().split()) for path in sorted(cwd.glob("got.*"))]
        seen.append((record["JobState"], record["Restarts"], got))
    assert seen == [("TIMEOUT", "0", [{"SIGTERM"}] * 2)] * 2
    cwd = timed[TOOLS[1]][1]
    assert not list(cwd.glob("state/jobs/*/incidents.jsonl"))
