"""A launcher in a slot that asks for ranks, and when it has to start them itself."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import slot_driver
from slot_driver import Driver

from robust_slurm import process_stat
from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.processes.surroundings import same_surroundings
from srun_wrapper.agent.warm.imports import pack, unpack
from srun_wrapper.protocol.messages import Imports, Stop, Stopped, Warmup

pytestmark = pytest.mark.slow

drivers, drive = slot_driver.drivers, slot_driver.drive

LAUNCHER = """
import os, pathlib, signal, subprocess, sys, time
base = pathlib.Path(sys.argv[1])
from robust_slurm.auto import launched
def rank(name, ask):
    environ = dict(os.environ, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", RANK="0")
    launched._tell_imports()
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
for number in (signal.SIGTERM, signal.SIGHUP):  # two of those that torchrun handles
    signal.signal(number, stop)
running = rank("one.py", False)
order("go")
running.kill(); running.wait()
running = rank((base / "go").read_text(), True)
(base / "running").write_text(str(running.pid))
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


def programs(directory: Path, before: str = "") -> str:
    """The command of a slot: a shell that runs the launcher."""
    for name in ("one.py", "two.py"):
        (directory / name).write_text(RANK)
    (directory / "launcher.py").write_text(LAUNCHER)
    shell = directory / "run.sh"
    command = f"{before} {sys.executable} {directory}/launcher.py {directory}"
    shell.write_text(f"#!/bin/sh\n{command}\n")
    shell.chmod(0o755)
    return str(shell)


@pytest.fixture
def job(drive: Any, tmp_path: Path) -> Any:
    def make(before: str = "", **options: Any) -> Driver:
        driver: Driver = drive(programs(tmp_path, before), warm=True, **options)
        driver.launch()
        driver.wait(lambda: "one.py" in text(driver, "runs"))
        return driver

    return make


def text(d: Driver, name: str) -> str:
    path = d.base / name
    return path.read_text() if path.exists() else ""


def warm(d: Driver) -> int:
    d.wait(lambda: text(d, "warm-ranks") == "1" and len(interpreters(d)) == 1)
    return interpreters(d)[0]


def interpreters(d: Driver) -> list[int]:
    """Return the pids of interpreters, and of stand-ins that have come to the slot's process."""
    return [
        p for p in process_tree.children(d.process.pid) if proc_words(p).startswith(b"robust-warm:")
    ]


def go(d: Driver, name: str) -> None:
    (d.base / "go.new").write_text(name)
    (d.base / "go.new").rename(d.base / "go")


def test_the_same_script_is_forked(job: Any) -> None:
    d = job()
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "started.one.py") == "warm")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")


def test_signals_ignored_from_outside_change_nothing(job: Any) -> None:
    """Under nohup: torchrun, which handles SIGHUP, must not look unlike robust-task."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        d = job()
    finally:
        signal.signal(signal.SIGHUP, before)
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "started.one.py") == "warm")


def test_one_is_forked_before_it_is_asked_for(job: Any) -> None:
    d = job(stand_in=0.0)
    d.wait(lambda: text(d, "warm-ranks") == "1" and len(interpreters(d)) == 2)
    waiting = set(interpreters(d))
    # When all sleep at once, the slot's process knows of the one that was forked.
    d.wait(lambda: {process_stat.read(p).state for p in (*waiting, d.process.pid)} == {"S"})
    go(d, "one.py")
    d.wait(lambda: text(d, "started.one.py") == "warm")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")
    (rank,) = waiting - set(interpreters(d))
    assert b"one.py" in proc_words(rank)
    d.wait(lambda: len(interpreters(d)) == 2)  # and another one for the next time


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


def ahead(d: Driver, drivers: list[Driver], ranks: int, **environ: str) -> Driver:
    """A spare that has been told of as many ranks as those of ``d``, and has them ready."""
    imports = d.get(Imports)
    assert imports.ranks == 1
    base = d.base / "spare"
    base.mkdir()
    spare = Driver(base, [programs(base)], warm=True)
    drivers.append(spare)
    learnt = unpack(imports.learnt)
    words = (*learnt.words[:2], str(base / "one.py"), "argument")
    told = pack(msgspec.structs.replace(learnt, words=words))
    spare.order(Warmup(told, ranks, imports.environ | environ))
    spare.wait(lambda: text(spare, "warm-ranks") == str(ranks))
    return spare


def test_a_spare_ends_what_its_launcher_has_no_ranks_for(job: Any, drivers: list[Driver]) -> None:
    spare = ahead(job(), drivers, 3)
    spare.launch()
    spare.wait(lambda: "one.py" in text(spare, "runs"))
    go(spare, "one.py")
    spare.wait(lambda: text(spare, "started.one.py") == "warm")
    spare.wait(lambda: text(spare, "warm-ranks") == "1")


def test_a_spare_whose_environment_is_another_learns_it(job: Any, drivers: list[Driver]) -> None:
    spare = ahead(job(), drivers, 1, MALLOC_ARENA_MAX="7")
    before = warm(spare)
    spare.launch()
    spare.wait(lambda: before not in spare.below() and interpreters(spare))
    assert warm(spare) != before
    go(spare, "one.py")
    spare.wait(lambda: text(spare, "started.one.py") == "warm")


def test_a_path_that_is_not_utf_8(job: Any) -> None:
    """The path is not told to others, and the rank is started as always."""
    d = job("LD_LIBRARY_PATH=$(printf '/opt/caf\\351/lib')")
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")
    assert not any(isinstance(event, Imports) for event in d.events)


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
    """No requester is left, and the next start is normal."""
    d = job()
    os.kill(warm(d), signal.SIGSTOP)
    go(d, "one.py")
    d.wait(lambda: text(d, "warm-asked") == "True")
    (launcher,) = (p for p in d.below() if b"launcher.py" in proc_words(p))
    os.kill(launcher, signal.SIGKILL)
    d.wait(lambda: d.below() == [])
    assert text(d, "runs") == "one.py "
    d.start(2)
    d.get(Stopped)
    d.wait(lambda: text(d, "runs").startswith("one.py one.py "))


def proc_words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""


def test_its_ranks_have_the_time_that_a_stop_gives(job: Any) -> None:
    d = job("exec")
    warm(d)
    go(d, "one.py")
    d.wait(lambda: text(d, "runs") == "one.py one.py ")
    d.wait(lambda: text(d, "running"))  # the launcher knows it, too: it may run before that
    d.order(Stop(1, 8.0))
    d.get(Stopped)
    assert text(d, "ended") == "7"
    assert not [
        p for p in d.below() if process_tree.usage([p]).state and b"one.py" in proc_words(p)
    ]
