"""A live test that failed runs once more, alone; a pure test never does."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import rerun
from tests.rerun import Known, complaints, parse, render, to_rerun

REPOSITORY = Path(__file__).resolve().parents[1]
TODAY = datetime.date(2026, 11, 23)
INI = '[tool.pytest.ini_options]\naddopts = "-ra"\nmarkers = ["cluster: on a real Slurm"]\n'
TINY = """
import pathlib, pytest
cluster = pytest.mark.cluster

def fails_once(name):
    first = pathlib.Path(name)
    if not first.exists():
        first.touch()
        print("said by the first run")
        raise AssertionError("not this time")
    print("said by the second run")

@cluster
def test_flaky(): fails_once("one")

@pytest.fixture
def shaky(): fails_once("two")

@cluster
def test_flaky_setup(shaky): pass

@cluster
def test_good(): pass

@cluster
def test_skipped_then():
    if not WORKS:
        if pathlib.Path("skip").exists(): pytest.skip("cannot be run now")
        pathlib.Path("skip").touch()
        raise AssertionError("failed, and never passed")

@cluster
def test_broken(): assert WORKS

def test_pure():
    if not WORKS: fails_once("three")
"""
LIVE = """
import asyncio, pathlib, pytest, subprocess, threading

def fails_once(name):
    first = pathlib.Path(name)
    if not first.exists():
        first.touch()
        raise AssertionError("not this time")

def test_thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    fails_once("one")

def test_process():
    subprocess.run(["true"])
    fails_once("two")

def test_loop():
    asyncio.run(asyncio.sleep(0))
    fails_once("three")

@pytest.fixture(scope="module")
def server(): return subprocess.run(["true"])

@pytest.fixture(scope="module")
def table(): return {}

def test_starts_the_server(server): pass

def test_has_the_server_of_another(server): fails_once("four")

def test_none_of_it_so_a_pure_test(table): fails_once("five")
"""


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        ([], []),
        ([("a", False)], []),
        ([("a", True), ("b", False)], ["a"]),
        ([("a", True), ("a", True)], ["a"]),  # its call and its teardown
        ([(str(n), True) for n in range(5)], ["0", "1", "2", "3", "4"]),
        ([(str(n), True) for n in range(6)], []),
    ],
)
def test_which_run_again(failed: list[tuple[str, bool]], again: list[str]) -> None:
    assert to_rerun(failed) == again


def ago(days: int, count: int = 1) -> list[Known]:
    return [Known(f"t{n}", TODAY - datetime.timedelta(days)) for n in range(count)]


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ([], []),
        (ago(7, 5), []),
        (ago(0, 6), ["6 tests are known to be flaky, at most 5 may be: mend some"]),
        (ago(8), ["t0 has been flaky since 2026-11-15: mend it"]),
    ],
)
def test_known_ones_are_few_and_young(known: list[Known], why: list[str]) -> None:
    assert complaints(known, TODAY) == why


def test_the_file_keeps_what_is_added() -> None:
    odd = 'tests/a.py::test_b[it\'s "1"\\\\]'
    assert parse("# why\n" + render([odd], TODAY)) == [Known(odd, TODAY)]
    with pytest.raises(ValueError, match="needs id and since"):
        parse("[[test]]\nid = 'a'\n")


def test_the_committed_file_is_readable() -> None:
    assert len(parse((REPOSITORY / rerun.FILE).read_text())) <= rerun.MOST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plugins", "works", "code", "counts"),
    [
        (["-p", "xdist", "-n", "2"], True, 0, "6 passed, 2 flaky in "),
        ([], False, 1, "3 failed, 3 passed, 2 flaky in "),
    ],
)
def test_a_run(tmp_path: Path, plugins: list[str], works: bool, code: int, counts: str) -> None:
    program = TINY.replace("WORKS", str(works))
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_tiny.py").write_text(program)
    (tmp_path / "pyproject.toml").write_text(INI)
    first = run(tmp_path, *plugins)
    assert first.returncode == code, first.stdout
    assert first.stdout.splitlines()[-1].strip("= ").startswith(counts)
    flaky = first.stdout.partition(" FLAKY ")[2]
    for text in ("test_tiny.py::test_flaky", "said by the first run", "said by the second run"):
        assert text in flaky
    known = parse((tmp_path / rerun.FILE).read_text())
    ids = ["test_tiny.py::test_flaky", "test_tiny.py::test_flaky_setup"]
    assert sorted(one.id for one in known) == ids
    assert ("- second run, alone -" in first.stdout) == (not works)
    if code == 0:
        assert " KNOWN TO BE FLAKY " in run(tmp_path, *plugins).stdout


def test_threads_processes_and_loops_make_a_test_a_live_one(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_live.py").write_text(LIVE)
    done = run(tmp_path)
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 failed, 5 passed, 4 flaky in ")
    known = {one.id.partition("::")[2] for one in parse((tmp_path / rerun.FILE).read_text())}
    assert known == {
        "test_thread",
        "test_process",
        "test_loop",
        "test_has_the_server_of_another",
    }


def test_a_run_fails_when_a_flaky_test_grows_old(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / rerun.FILE).write_text("[[test]]\nid = 'x'\nsince = 2026-01-01\n")
    (tmp_path / "test_good.py").write_text("def test_good(): pass\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "The run fails: x has been flaky since 2026-01-01: mend it" in done.stdout
    assert done.stdout.splitlines()[-1].strip("= ").startswith("1 passed in ")


def run(directory: Path, *plugins: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "pytest", "-p", "tests.rerun", *plugins]
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        argv,
        cwd=directory,
        env=env | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )
