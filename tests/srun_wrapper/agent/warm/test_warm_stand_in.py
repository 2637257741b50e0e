"""A rank that was forked before it was wanted: the same as any other, and given up for the same."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from places import PROGRAMS
from slot_driver import Driver

from srun_wrapper.protocol.messages import Exited, Signal, Stop, Stopped

pytestmark = pytest.mark.slow

drivers, drive = slot_driver.drivers, slot_driver.drive
PROGRAM = PROGRAMS / "warm_facts.py"
WAITS = "import robust_slurm, signal\nrobust_slurm.beat(1)\nsignal.pause()\n"


def stand_in(d: Driver, old: int = 0) -> int:
    """Return the stand-in's pid, as soon as it waits; it is another one than ``old``."""
    found = 0

    def there() -> bool:
        nonlocal found
        path = d.base / "stand-in"
        found = int(path.read_text()) if path.exists() else 0
        return found not in (0, old)

    d.wait(there, 30)
    return found


@pytest.fixture
def waiting(drive: Any, tmp_path: Path) -> tuple[Driver, int, int]:
    """A rank, a warm interpreter and a stand-in: the driver, the last two's pids."""
    path = tmp_path / "script.py"
    path.write_text(WAITS)
    d: Driver = drive(sys.executable, str(path), warm=True, stand_in=0.0)
    rank = d.launch().pid
    own = stand_in(d)
    d.wait(lambda: len(d.below()) == 3)  # whoever forked it may not be reaped yet
    (interpreter,) = set(d.below()) - {rank, own}
    return d, interpreter, own


def test_it_sees_what_a_fresh_process_sees(
    drive: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-W", "error", "-X", "utf8", str(PROGRAM), "--lr=0.1", "wait", "ünï"]
    d = drive(*words, warm=True, stand_in=0.0)
    assert not d.launch().warm
    own = 0
    for epoch in (2, 3):
        own = stand_in(d, own)
        started = d.launch(epoch=epoch)
        assert started.warm and started.pid == own
    d.wait(lambda: d.stdout().count("\n") == 3)
    fresh, *others = map(json.loads, d.stdout().splitlines())
    assert others == [fresh, fresh]


def test_it_knows_whether_its_program_uses_torchs_store(drive: Any, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "from robust_slurm.auto import listening\nprint(listening.visits, flush=True)\n"
        f"listening.is_used = lambda: True\n{WAITS}"
    )
    d = drive(sys.executable, str(path), warm=True, stand_in=0.0)
    d.launch()
    stand_in(d)
    assert d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "False\nTrue\n")


def test_waiting_it_does_not_look_like_a_rank(waiting: tuple[Driver, int, int]) -> None:
    _, _, own = waiting
    assert Path(f"/proc/{own}/comm").read_text() == "robust-warm\n"
    assert Path(f"/proc/{own}/cmdline").read_text().startswith("robust-warm:")
    assert Path(f"/proc/{own}/environ").read_text().strip("\0") == ""


@pytest.mark.parametrize(
    ("text", "code", "signum"),
    [("sys.exit(3)", 3, None), ("os._exit(7)", 7, None), ("os.kill(os.getpid(), 9)", None, 9)],
)
def test_one_that_ends_at_once_ran_once(
    drive: Any, tmp_path: Path, text: str, code: int | None, signum: int | None
) -> None:
    path = tmp_path / "script.py"
    first = WAITS.replace("signal.p", "if robust_slurm.epoch() == 1: signal.p")
    path.write_text(f"import os, sys\nos.write(1, b'x')\n{first}{text}\n")
    d = drive(sys.executable, str(path), warm=True, stand_in=0.0)
    d.launch()
    own = stand_in(d)
    started = d.launch(epoch=2)
    assert started.pid == own
    exited = d.get(Exited)
    assert (exited.code, exited.signal) == (code, signum)
    assert d.stdout() == "xx"


def test_each_has_its_own_random_numbers(drive: Any, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import random\n" + WAITS.replace("signal.p", "print(random.random())\nsignal.p")
    )
    d = drive(sys.executable, "-u", str(path), warm=True, stand_in=0.0)
    d.launch()
    own = 0
    for epoch in (2, 3, 4):
        own = stand_in(d, own)
        d.wait(lambda n=epoch - 1: len(d.stdout().split()) == n)  # the next launch ends it
        assert d.launch(epoch=epoch).pid == own
    d.wait(lambda: len(set(d.stdout().split())) == 4)


def test_killed_it_is_not_missed(waiting: tuple[Driver, int, int]) -> None:
    """Another one is forked when it is wanted, and the next one stands by again."""
    d, interpreter, own = waiting
    os.kill(own, signal.SIGKILL)
    d.wait(lambda: (d.base / "stand-in").read_text() == "0")
    started = d.launch(epoch=2)
    assert started.warm and interpreter in d.below()
    stand_in(d, own)


@pytest.mark.parametrize("of", ["stand-in", "interpreter"])
def test_stuck_it_is_given_up(waiting: tuple[Driver, int, int], of: str) -> None:
    """Stop either process; a stand-in needs no other process to become a rank."""
    d, interpreter, own = waiting
    os.kill(own if of == "stand-in" else interpreter, signal.SIGSTOP)
    started = d.launch(epoch=2)
    assert started.warm == (of == "interpreter")
    d.wait(lambda: (own in d.below()) == (of == "interpreter"))


def test_a_change_of_what_it_has_imported_is_noticed(drive: Any, tmp_path: Path) -> None:
    site = tmp_path / "lib"
    site.mkdir()
    (site / "installed.py").write_text("VALUE = 'old'\n")
    path = tmp_path / "script.py"
    path.write_text(
        f"import sys; sys.path.append({str(site)!r})\n"
        f"import installed\nprint(installed.VALUE, flush=True)\n{WAITS}"
    )
    d = drive(
        sys.executable, str(path), warm=True, stand_in=0.0, path=str(site), packages=["installed"]
    )
    d.launch()
    old = stand_in(d)
    (site / "installed.py").write_text("VALUE = 'newer'\n")
    assert not d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "old\nnewer\n")
    stand_in(d, old)
    assert d.launch(epoch=3).warm
    d.wait(lambda: d.stdout() == "old\nnewer\nnewer\n")


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM])
def test_signals_for_the_job_do_not_end_it(waiting: tuple[Driver, int, int], signum: int) -> None:
    d, _, own = waiting
    os.kill(own, signum)
    assert d.launch(epoch=2).pid == own
    d.order(Signal(signum))  # and as a rank it hears them
    assert d.get(Exited).signal == signum


def test_a_stop_while_it_is_asked(waiting: tuple[Driver, int, int]) -> None:
    d, _, own = waiting
    d.stop_while_asked(own)


def test_a_stop_while_it_is_made(drive: Any, tmp_path: Path) -> None:
    """A stand-in on its way ends with all others; a new one is made after the next start."""
    path = tmp_path / "script.py"
    path.write_text(WAITS)
    d = drive(sys.executable, str(path), warm=True, stand_in=3.0)
    rank = d.launch().pid
    d.wait_warm()
    (interpreter,) = set(d.below()) - {rank}
    os.kill(interpreter, signal.SIGSTOP)
    d.wait(lambda: (d.base / "making").read_text() == "True")
    d.order(Stop(1, 0.0))
    d.get(Stopped)
    os.kill(interpreter, signal.SIGCONT)
    assert d.launch(epoch=2).warm
    own = stand_in(d)
    d.wait(lambda: len(d.below()) == 3)  # nobody is left of the first one
    assert d.launch(epoch=3).pid == own


def test_it_ends_with_its_shim(waiting: tuple[Driver, int, int]) -> None:
    d, interpreter, own = waiting
    d.process.kill()
    d.process.wait(10)
    d.wait(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in (interpreter, own)))
