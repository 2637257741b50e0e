"""A launcher in a slot that asks for ranks, and when it has to start them itself."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from slot_driver import Driver

from srun_wrapper import proc
from srun_wrapper.messages import Stop, Stopped
from srun_wrapper.surroundings import same_surroundings

drivers, drive = slot_driver.drivers, slot_driver.drive

LAUNCHER = """
import os, pathlib, signal, subprocess, sys, time
base = pathlib.Path(sys.argv[1])
from robust_slurm.auto import launched
def rank(name, ask):
    environ = dict(os.environ, LOCAL_RANK="0", RANK="0")
    words = [sys.executable, "-u", str(base / name), "argument"]
    process = launched.ask(words, environ, [None, None]) if ask else None
    (base / f"started.{name}").write_text("cold" if process is None else "warm")
    return process or subprocess.Popen(words, env=environ, start_new_session=True)
def order(name):
    while not (base / name).exists():
        time.sleep(0.01)
def stop(*_):
    if running.poll() is None:
        os.killpg(running.pid, signal.SIGTERM)
    (base / "ended").write_text(str(running.wait(10)))
    sys.exit(1)
signal.signal(signal.SIGTERM, stop)
running = rank("one.py", False)
order("go")
running.kill(); running.wait()
running = rank((base / "go").read_text(), True)
signal.pause()
"""
RANK = """
import pathlib, signal, sys, time
import robust_slurm
def end(*_):
    time.sleep(0.2)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
robust_slurm.beat(1)
(pathlib.Path(__file__).parent / "runs").open("a").write(pathlib.Path(__file__).name + " ")
signal.pause()
signal.pause()
"""


@pytest.fixture
def job(drive: Any, tmp_path: Path) -> Any:
    def make(before: str = "") -> Driver:
        for name in ("one.py", "two.py"):
            (tmp_path / name).write_text(RANK)
        (tmp_path / "launcher.py").write_text(LAUNCHER)
        shell = tmp_path / "run.sh"
        command = f"{before} {sys.executable} {tmp_path}/launcher.py {tmp_path}"
        shell.write_text(f"#!/bin/sh\n{command}\n")
        shell.chmod(0o755)
        driver: Driver = drive(str(shell), warm=True)
        driver.launch()
        driver.wait(lambda: "one.py" in text(driver, "runs"))
        return driver

    return make


def text(d: Driver, name: str) -> str:
    path = d.base / name
    return path.read_text() if path.exists() else ""


def warm(d: Driver) -> int:
    d.wait(lambda: text(d, "warm-ranks") == "1")
    (found,) = (p for p in d.below() if "robust-warm" in Path(f"/proc/{p}/comm").read_text())
    return found


def go(d: Driver, name: str) -> None:
    (d.base / "go.new").write_text(name)
    (d.base / "go.new").rename(d.base / "go")


def test_the_same_script_is_forked(job: Any) -> None:
    d = job()
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "started.one.py") == "warm")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")


def test_another_script_is_not(job: Any) -> None:
    d = job()
    warm(d)
    go(d, "two.py")
    d.wait(lambda: text(d, "started.two.py") == "cold")
    d.wait(lambda: text(d, "runs") == "one.py two.py ")


@pytest.mark.parametrize(
    "before", ["ulimit -S -n 512;", "umask 077;", "taskset -c {cpu}", "nice", "nohup"]
)
def test_a_launcher_that_hands_on_something_else_starts_its_ranks(job: Any, before: str) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if "taskset" in before and (len(cpus) < 2 or not shutil.which("taskset")):
        pytest.skip("needs taskset and two processors")
    d = job(before.replace("{cpu}", str(cpus[0])))
    go(d, "one.py")
    d.wait(lambda: text(d, "started.one.py") == "cold")
    assert text(d, "warm-ranks") == "0"


def test_surroundings_that_cannot_be_seen_are_others() -> None:
    assert same_surroundings(os.getpid(), 0, os.getpid())
    assert not same_surroundings(0, 0, os.getpid())
    assert not same_surroundings(os.getpid(), 1, os.getpid())


def test_a_stop_while_it_is_asked(job: Any) -> None:
    d = job()
    os.kill(warm(d), signal.SIGSTOP)
    go(d, "one.py")
    d.wait(lambda: text(d, "warm-asked") == "True")
    d.order(Stop(1, 0.0))
    d.get(Stopped)
    assert d.below() == []


def test_the_launcher_dies_while_it_is_asked(job: Any) -> None:
    """Nobody is left who asked for it, and the next start is as always."""
    d = job()
    os.kill(warm(d), signal.SIGSTOP)
    go(d, "one.py")
    d.wait(lambda: text(d, "warm-asked") == "True")
    (launcher,) = (p for p in d.below() if b"launcher.py" in proc_words(p))
    os.kill(launcher, signal.SIGKILL)
    d.wait(lambda: d.below() == [])
    d.start(2)
    d.get(Stopped)
    assert text(d, "runs") == "one.py "


def proc_words(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def test_its_ranks_have_the_time_that_a_stop_gives(job: Any) -> None:
    d = job("exec")
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")
    d.order(Stop(1, 8.0))
    d.get(Stopped)
    assert text(d, "ended") == "7"
    assert not [p for p in d.below() if proc.usage([p]).state and b"one.py" in proc_words(p)]
