"""A rank in ``resilient()`` and its slot: it stays for the next epoch, or is ended as ever."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from places import REPOSITORY
from slot_driver import Driver

from robust_slurm.record import BeatReader, record_path
from srun_wrapper.agent.processes.ports import free_port
from srun_wrapper.protocol.messages import Exited, RankStart, Start, Started, Stop, Stopped

pytestmark = pytest.mark.slow

drivers, drive = slot_driver.drivers, slot_driver.drive
WORLD = 3
SLEEPY = """
import os, sys, time, robust_slurm

@robust_slurm.resilient
def train():
    print("begins", os.environ["ROBUST_EPOCH"], os.environ.get("ROBUST_RESUME_STEP"), flush=True)
    for step in range(10**6):
        robust_slurm.beat(step)
        time.sleep({pause})
train()
"""
TWICE = SLEEPY.format(pause=0.01).replace(
    "def train():", "def before(): pass\nbefore()\n@robust_slurm.resilient\ndef train():"
)
STORE = (
    "import time\nfrom robust_slurm.auto import listening\n"
    "listening.hold = lambda begin: print('holds', begin > 0, flush=True)\n" + SLEEPY
)
PLAIN = "import time; print('begins', flush=True); time.sleep(600)"
LIMIT = 20.0  # s for a rank to answer, on a machine that does other things too
AT_ONCE = 0.3


def start(epoch: int, rank: int = 0, world: int = 1, rejoin: bool = True, **env: str) -> Start:
    env = {"SLURM_NTASKS": str(world), "WORLD_SIZE": str(world), "ROBUST_EPOCH": str(epoch)} | env
    own = RankStart(0, rank, {"RANK": str(rank), "LOCAL_RANK": "0"})
    return Start(epoch, env, (own,), 0.2, 0, epoch == 1, 1, "127.0.0.1", 1, rejoin=rejoin)


def begin(drive: Any, code: str = SLEEPY.format(pause=0.01)) -> tuple[Driver, Started]:
    driver = drive(sys.executable, "-c", code)
    driver.order(start(1, ROBUST_RESUME_STEP="3"))
    driver.get(Stopped)
    started = driver.get(Started)
    driver.wait(lambda: "begins" in driver.stdout())
    return driver, started


def next_epoch(driver: Driver, order: Start, limit: float = LIMIT) -> Started:
    driver.order(Stop(order.epoch - 1, 0.2, limit))
    driver.get(Stopped)
    driver.order(order)
    return driver.get(Started)


def test_it_stays_with_the_environment_of_the_next_epoch(drive: Any) -> None:
    """… as often as it is asked, and its heartbeat goes into the new record."""
    driver, first = begin(drive)
    for epoch in (2, 3):
        again = next_epoch(driver, start(epoch))
        assert (again.pid, again.kept, again.epoch) == (first.pid, True, epoch)
        driver.wait(lambda text=f"begins {epoch} None\n": text in driver.stdout())
        reader = BeatReader(record_path(str(driver.base), epoch, 0))
        driver.wait(lambda reader=reader: (beat := reader.read()) is not None and beat.beats > 2)
    assert driver.stdout().startswith("begins 1 3\n")
    driver.order(Stop(3, 0.2))
    driver.get(Stopped)
    assert driver.below() == []


def test_it_goes_on_after_rank_0(drive: Any) -> None:
    """The rank would look for rank 0's store too early, and torch waits half a second then."""
    driver = drive(sys.executable, "-c", STORE.format(pause=0.01))
    driver.order(start(1, rank=1))
    driver.get(Stopped)
    pid = driver.get(Started).pid
    driver.wait(lambda: "begins 1" in driver.stdout())
    assert next_epoch(driver, start(2, rank=1)).pid == pid
    driver.wait(lambda: "begins 2" in driver.stdout())
    said = driver.stdout().splitlines()
    assert said == ["holds False", "begins 1 None", "holds True", "begins 2 None"]


@pytest.mark.parametrize(
    ("order", "code", "limit"),
    [
        (start(2, rank=1), SLEEPY.format(pause=0.01), LIMIT),  # another part of the world
        (start(2, world=2), SLEEPY.format(pause=0.01), LIMIT),
        (start(2, rejoin=False), SLEEPY.format(pause=0.01), LIMIT),  # nothing to resume from
        (start(2), SLEEPY.format(pause=0.01), 0.0),  # not asked
        (start(2), SLEEPY.format(pause=600), AT_ONCE),  # in C: it does not answer
        (start(2), PLAIN, LIMIT),
        (start(2), TWICE, LIMIT),  # a new one would begin with another function
    ],
)
def test_it_is_replaced(drive: Any, order: Start, code: str, limit: float) -> None:
    driver, first = begin(drive, code)
    again = next_epoch(driver, order, limit)
    assert again.pid != first.pid and not again.kept
    driver.wait(lambda: driver.stdout().count("begins") == 2)


def test_one_that_is_killed_while_it_waits_is_replaced(drive: Any) -> None:
    driver, first = begin(drive)
    driver.order(Stop(1, 0.2, LIMIT))
    driver.get(Stopped)
    os.kill(first.pid, signal.SIGKILL)
    driver.get(Exited)
    driver.order(start(2))
    assert not driver.get(Started).kept


def test_one_that_waits_is_ended_when_no_process_is_trusted_any_more(drive: Any) -> None:
    """… as by another failure in between: so its machine can be tested."""
    driver, _ = begin(drive)
    for limit in (LIMIT, 0.0):
        driver.order(Stop(1, 0.2, limit))
        driver.get(Stopped)
    assert driver.below() == []


def test_its_end_is_not_explained_by_what_was_before(drive: Any) -> None:
    """Last words of the epoch before, and torch's file of then, do not explain the end."""
    says = "    print('a line of', os.environ['ROBUST_EPOCH'], file=sys.stderr)\n    for step"
    code = SLEEPY.format(pause=0.01).replace("    for step", says)
    driver, first = begin(drive, code)
    driver.wait(lambda: "a line of 1" in driver.stderr())
    left = driver.base / "error-0.json"
    left.write_text("{}")
    assert next_epoch(driver, start(2)).pid == first.pid
    driver.wait(lambda: "a line of 2" in driver.stderr())
    assert not left.exists()
    os.kill(first.pid, signal.SIGKILL)
    assert driver.get(Exited).tail == "a line of 2\n"


def test_an_error_of_the_program_ends_it_at_once(drive: Any) -> None:
    code = SLEEPY.format(pause=0.01).replace("time.sleep", "int('x');")
    driver = drive(sys.executable, "-c", code)
    driver.order(start(1))
    exited = driver.get(Exited)
    assert exited.code == 1 and "ValueError" in exited.tail


def test_gloo(tmp_path: Path, drivers: list[Driver]) -> None:
    """A rank is stopped while the others wait for it in a collective; then the one with the store
    is killed. Each time it is the only new one, and all compute the same again."""
    pytest.importorskip("torch")
    program = str(REPOSITORY / "tests" / "programs" / "rejoin_ddp.py")
    for rank in range(WORLD):
        base = tmp_path / str(rank)
        base.mkdir()
        drivers.append(Driver(base, [sys.executable, program, str(tmp_path), "stop:2", "kill:0"]))
    pids: list[list[int]] = []
    for epoch in (1, 2, 3):
        port = str(free_port())
        for rank, driver in enumerate(drivers):
            env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            driver.order(start(epoch, rank, WORLD, **env))
        pids.append([driver.get(Started, 30.0).pid for driver in drivers])
        if epoch == 3:
            break
        bad = drivers[(2, 0)[epoch - 1]]
        bad.wait(lambda bad=bad, text=f"held {epoch}\n": text in bad.stdout(), 60.0)
        (tmp_path / f"go.{epoch}").touch()
        if epoch == 2:
            bad.get(Exited)
        for driver in drivers:
            driver.order(Stop(epoch, 0.2, 3.0))
        for driver in drivers:
            driver.get(Stopped, 30.0)
    for driver in drivers:
        assert driver.get(Exited, 60.0).code == 0, driver.stderr()
    first, second, third = pids
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False]
    assert [a == b for a, b in zip(second, third, strict=True)] == [False, True, True]
    assert len({driver.stdout().split("ends 3 ")[1] for driver in drivers}) == WORLD
