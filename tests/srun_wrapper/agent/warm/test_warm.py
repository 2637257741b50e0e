"""A rank that is forked from a warm interpreter is what a fresh one is; else it is started cold."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from places import PROGRAMS
from slot_driver import Driver

from srun_wrapper.agent.processes import process_tree
from srun_wrapper.agent.warm.imports import is_interpreter
from srun_wrapper.protocol.messages import (
    Exited,
    Imports,
    Signal,
    Started,
    Stop,
    Stopped,
    WarmRanks,
)

pytestmark = pytest.mark.slow

drivers, drive = slot_driver.drivers, slot_driver.drive
PROGRAM = PROGRAMS / "warm_facts.py"


def next_one(d: Driver, epoch: int) -> Started:
    """Started by fork, after the first one has shown what it imports."""
    d.wait_warm()
    return d.launch(epoch=epoch)


def lines(d: Driver, count: int) -> list[Any]:
    d.wait(lambda: d.stdout().count("\n") >= count)
    return [json.loads(line) for line in d.stdout().splitlines()]


def as_module(base: Path) -> list[str]:
    package = base / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PROGRAM, package / "__main__.py")
    return [sys.executable, "-m", "pkg", "wait"]


def as_script(base: Path) -> list[str]:
    script = base / "train"
    script.write_text(f"#!{sys.executable}\n" + PROGRAM.read_text())
    script.chmod(0o755)
    return [str(script), "wait"]


def as_code(_base: Path) -> list[str]:
    return [sys.executable, "-u", "-c", f"__file__ = ''\n{PROGRAM.read_text()}", "wait"]


def as_file(_base: Path) -> list[str]:
    return [sys.executable, "-W", "error", "-X", "utf8", str(PROGRAM), "--lr=0.1", "wait", "ünï"]


@pytest.mark.parametrize("form", [as_file, as_module, as_script, as_code])
def test_it_sees_what_a_fresh_process_sees(
    drive: Any, tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    d = drive(*form(tmp_path), warm=True)
    assert not d.launch().warm
    d.wait_warm()
    (fresh,) = lines(d, 1)
    for epoch in (2, 3):
        assert d.launch(epoch=epoch).warm
        assert lines(d, epoch)[-1] == fresh


def test_waiting_it_does_not_look_like_a_rank(drive: Any) -> None:
    d = drive(*as_file(Path()), warm=True)
    rank = d.launch().pid
    d.wait_warm()
    (warm,) = set(d.below()) - {rank}
    assert Path(f"/proc/{warm}/comm").read_text() == "robust-warm\n"
    assert Path(f"/proc/{warm}/cmdline").read_text().startswith("robust-warm:")
    assert Path(f"/proc/{warm}/environ").read_text().strip("\0") == ""


def script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text("import json, os, sys\nimport robust_slurm\nrobust_slurm.beat(1)\n" + text)
    return [sys.executable, str(path)]


LATER = "if robust_slurm.epoch() == 1: import signal; signal.pause()\n"


@pytest.mark.parametrize(
    ("text", "code", "signum"),
    [
        ("sys.exit(3)", 3, None),
        ("", 0, None),
        ("raise ValueError('last words')", 1, None),
        ("os._exit(7)", 7, None),
        ("os.kill(os.getpid(), 9)", None, 9),
        ("os.abort()", None, 6),
        ("import signal; signal.raise_signal(15)", None, 15),
        ("raise KeyboardInterrupt", None, 2),
    ],
)
def test_how_it_ends(
    drive: Any, tmp_path: Path, text: str, code: int | None, signum: int | None
) -> None:
    d = drive(*script(tmp_path, LATER + text), warm=True)
    d.launch()
    assert next_one(d, 2).warm
    exited = d.get(Exited)
    assert (exited.code, exited.signal) == (code, signum)
    if "words" in text:
        assert exited.tail.endswith("ValueError: last words\n")
        assert "script.py" in exited.tail and "sitecustomize" not in exited.tail


def test_what_runs_at_the_end_runs(drive: Any, tmp_path: Path) -> None:
    text = "import atexit\natexit.register(print, 'second')\natexit.register(print, 'first')\n"
    d = drive(*script(tmp_path, LATER + text + "print('unflushed', end=' ')\n"), warm=True)
    d.launch()
    next_one(d, 2)
    d.get(Exited)
    d.wait(lambda: d.stdout() == "unflushed first\nsecond\n")


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_it_has_children_of_its_own(drive: Any, tmp_path: Path, method: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        "import multiprocessing, os, signal\nimport robust_slurm\n"
        "def double(n): return 2 * n, multiprocessing.parent_process() is not None\n"
        "if __name__ == '__main__':\n"
        "    robust_slurm.beat(1)\n"
        "    if robust_slurm.epoch() == 1: signal.pause()\n"
        f"    with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "        print(pool.map(double, [1, 2]), flush=True)\n"
    )
    d = drive(sys.executable, str(path), warm=True)
    d.launch()
    assert next_one(d, 2).warm
    assert d.get(Exited).code == 0, d.stderr()
    d.wait(lambda: d.stdout() == "[(2, True), (4, True)]\n")
    d.order(Stop(2, 0.0))
    d.get(Stopped)


def test_each_has_its_own_random_numbers(drive: Any, tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    text = (
        "import random, numpy, signal\n"
        + "print(random.random(), numpy.random.rand(), flush=True)\n"
    )
    path = script(tmp_path, text + "signal.pause()\n")
    body = Path(path[1]).read_text()
    Path(path[1]).write_text("import numpy.random\n" + body)
    d = drive(*path, warm=True)
    d.launch()
    d.wait_warm()
    for epoch in (2, 3):
        assert d.launch(epoch=epoch).warm
        d.wait(lambda: d.stdout().count("\n") == epoch)  # noqa: B023 - called here
    numbers = [word for line in d.stdout().splitlines() for word in line.split()]
    assert len(set(numbers)) == 6


def test_faulthandler_writes_where_it_should(drive: Any, tmp_path: Path) -> None:
    text = "import faulthandler, ctypes\nfaulthandler.enable()\nctypes.string_at(0)\n"
    d = drive(*script(tmp_path, LATER + text), warm=True)
    d.launch()
    assert next_one(d, 2).warm
    exited = d.get(Exited)
    assert exited.signal == signal.SIGSEGV
    assert "Segmentation fault" in exited.tail and "script.py" in exited.tail


def test_its_own_modules_are_read_anew(drive: Any, tmp_path: Path) -> None:
    """The training's own code may change between two starts."""
    (tmp_path / "mine.py").write_text("VALUE = 'old'\n")
    text = "import mine, signal\nprint(mine.VALUE, flush=True)\nsignal.pause()\n"
    d = drive(*script(tmp_path, text), warm=True)
    d.launch()
    d.wait_warm()
    (tmp_path / "mine.py").write_text("VALUE = 'newer'\n")
    assert d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "old\nnewer\n")


def test_what_it_imports_was_known_before(drive: Any, tmp_path: Path) -> None:
    """A second telling would copy what it shares with the interpreter that it was forked from."""
    d = drive(
        *script(tmp_path, "print('beaten', flush=True)\nimport signal; signal.pause()\n"), warm=True
    )
    d.launch()
    d.wait_warm()
    assert d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "beaten\nbeaten\n")
    assert not list(d.base.glob("2-*.modules"))


def test_a_change_of_what_it_has_imported_is_noticed(drive: Any, tmp_path: Path) -> None:
    """Started cold with the new code, and warm again after that."""
    site = tmp_path / "lib"
    site.mkdir()
    (site / "installed.py").write_text("VALUE = 'old'\n")
    hook = "import installed, signal\nprint(installed.VALUE, flush=True)\n"
    command = script(tmp_path, "")
    head = f"import sys; sys.path.append({str(site)!r})\n"
    Path(command[1]).write_text(
        f"{head}{hook}import robust_slurm; robust_slurm.beat(1); signal.pause()\n"
    )
    d = drive(*command, warm=True, path=str(site), packages=["installed"])
    d.launch()
    d.wait_warm()
    (site / "installed.py").write_text("VALUE = 'newer'\n")
    assert not d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "old\nnewer\n")
    assert next_one(d, 3).warm


@pytest.mark.parametrize("wrapper", ["sh -c", "script"])
def test_a_shell_around_it_is_started_as_always(drive: Any, tmp_path: Path, wrapper: str) -> None:
    command = script(tmp_path, "import signal; signal.pause()\n")
    if wrapper == "script":
        shell = tmp_path / "run.sh"
        shell.write_text(f"#!/bin/sh\nexec {sys.executable} {command[1]}\n")
        shell.chmod(0o755)
        d = drive(str(shell), warm=True)
    else:
        d = drive("sh", "-c", f"exec {' '.join(command)}", warm=True)
    d.launch()
    d.wait(lambda: any(d.base.glob("1-0.modules")))
    d.wait(lambda: len(d.below()) == 1)
    assert not d.launch(epoch=2).warm
    assert len(d.below()) == 1


def test_a_module_that_starts_a_thread_is_not_imported_ahead(drive: Any, tmp_path: Path) -> None:
    site = tmp_path / "lib"
    site.mkdir()
    (site / "threaded.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    )
    text = "import threaded, signal; robust_slurm.beat(1); signal.pause()\n"
    command = script(tmp_path, "")
    Path(command[1]).write_text("import robust_slurm\n" + text)
    d = drive(*command, warm=True, path=str(site), packages=["threaded"])
    d.launch()
    d.wait(lambda: any(d.base.glob("1-0.modules")))
    d.wait(lambda: (d.base / "warm-off").read_text() != "")
    d.wait(lambda: len(d.below()) == 1)
    assert d.get(WarmRanks).ready == 0, "or the job would wait until it is warm before it grows"
    assert not d.launch(epoch=2).warm


def test_killed_it_is_not_missed(drive: Any, tmp_path: Path) -> None:
    d = drive(*script(tmp_path, "import signal; signal.pause()\n"), warm=True)
    rank = d.launch().pid
    d.wait_warm()
    (warm,) = set(d.below()) - {rank}
    os.kill(warm, signal.SIGKILL)
    d.wait(lambda: d.below() == [rank])
    d.wait_warm(False)
    assert not d.launch(epoch=2).warm
    assert next_one(d, 3).warm


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP])
def test_signals_for_the_job_do_not_end_it(drive: Any, tmp_path: Path, signum: int) -> None:
    """Slurm sends them to every process of the step."""
    d = drive(*script(tmp_path, "import signal; signal.pause()\n"), warm=True)
    rank = d.launch().pid
    d.wait_warm()
    (warm,) = set(d.below()) - {rank}
    os.kill(warm, signum)
    started = d.launch(epoch=2)
    assert started.warm and warm in d.below()
    d.order(Signal(signum))  # and its rank hears them
    exited = d.get(Exited)
    assert exited.signal == signum


def test_stuck_it_is_given_up(drive: Any, tmp_path: Path) -> None:
    d = drive(*script(tmp_path, "import signal; signal.pause()\n"), warm=True)
    rank = d.launch().pid
    d.wait_warm()
    (warm,) = set(d.below()) - {rank}
    os.kill(warm, signal.SIGSTOP)
    started = d.launch(epoch=2)
    assert not started.warm
    kinds = [type(e).__name__ for e in d.events if not isinstance(e, (Imports, WarmRanks))]
    assert kinds == ["SlotHello", "Stopped", "Started", "Stopped", "Started"]
    d.wait(lambda: warm not in d.below())


def test_a_stop_while_it_is_asked(drive: Any, tmp_path: Path) -> None:
    d = drive(*script(tmp_path, "import signal; signal.pause()\n"), warm=True)
    rank = d.launch().pid
    d.wait_warm()
    (warm,) = set(d.below()) - {rank}
    d.stop_while_asked(warm)


def test_the_rank_dies_with_its_shim(drive: Any, tmp_path: Path) -> None:
    d = drive(*script(tmp_path, "import signal; signal.pause()\n"), warm=True)
    d.launch()
    next_one(d, 2)
    d.wait(lambda: len(d.below()) == 2)  # whoever forked it may not be reaped yet
    left = d.below()
    d.process.kill()
    d.process.wait(10)
    d.wait(lambda: all(process_tree.usage([pid]).state in ("", "Z") for pid in left))


PYTHON = "/usr/bin/python3"


@pytest.mark.parametrize(
    ("words", "command", "expected"),
    [
        ([PYTHON, "t.py", "-x"], [PYTHON, "t.py", "-x"], True),
        (["python", "t.py"], ["python", "t.py"], True),
        (["python", "t.py"], ["python3", "t.py"], False),
        (["python", "t.py", "-x"], ["python", "t.py"], False),
        (["python", "t.py"], ["bash", "t.py"], False),
        (["bash", "t.sh"], ["bash", "t.sh"], False),
        ([], ["python", "t.py"], False),
        ([PYTHON, "{dir}/script", "a"], ["{dir}/script", "a"], True),
        ([PYTHON, "-u", "{dir}/script", "a"], ["{dir}/script", "a"], True),
        ([PYTHON, "{dir}/script", "a"], ["script", "a"], True),
        ([PYTHON, "{dir}/other", "a"], ["{dir}/script", "a"], False),
        ([PYTHON, "{dir}/script", "b"], ["{dir}/script", "a"], False),
        ([PYTHON, "{dir}/shell"], ["{dir}/shell"], False),
    ],
)
def test_what_is_nothing_but_an_interpreter(
    tmp_path: Path, words: Sequence[str], command: Sequence[str], expected: bool
) -> None:
    for name, line in (("script", f"#!{PYTHON} -u\n"), ("shell", "#!/bin/sh\n")):
        (tmp_path / name).write_text(line)
        (tmp_path / name).chmod(0o755)
    put = [[word.replace("{dir}", str(tmp_path)) for word in each] for each in (words, command)]
    assert is_interpreter(put[0], put[1], {"PATH": str(tmp_path)}) is expected
