"""A warm interpreter that would not be as a fresh one is not made, or gives up."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slot_driver

from robust_slurm.auto import sources, warm
from robust_slurm.auto.sources import Sources, different
from srun_wrapper.agent.warm.imports import Learnt, pack, unpack

drivers, drive = slot_driver.drivers, slot_driver.drive
HERE = str(Path(sources.__file__).parents[2])


@pytest.mark.parametrize("option", ["-I", "-E", "-S"])
def test_without_the_hook_the_script_runs_once(drive: Any, tmp_path: Path, option: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(
        f"import signal, sys; sys.path.insert(0, {HERE!r})\n"
        "print('run', flush=True)\n"
        "import robust_slurm; robust_slurm.beat(1)\n"
        "from robust_slurm.auto import learnt; learnt.tell(sys.argv[1])\n"
        "print('told', flush=True)\n"
        "signal.pause()\n"
    )
    told = tmp_path / "told"
    d = drive(sys.executable, option, str(path), str(told), warm=True)
    d.launch()
    d.wait(lambda: "told" in d.stdout())
    assert not told.exists() and not list(tmp_path.glob("*.modules"))
    assert not d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "run\ntold\n" * 2)


def test_with_the_hook_it_is_told(tmp_path: Path) -> None:
    """The test before this one shows the option's effect and no other."""
    code = "import sys; from robust_slurm.auto import learnt; learnt.tell(sys.argv[1])"
    env = {"PYTHONPATH": f"{HERE}/robust_slurm/auto:{HERE}"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "told")], env=env, check=True)
    assert json.loads((tmp_path / "told").read_text())["modules"]


OWN = "WHO = 'own'\n"


def shadowing(tmp_path: Path) -> tuple[list[str], Path]:
    """A script, and a place beside it for a module that an installed one imports."""
    site, beside = tmp_path / "lib", tmp_path / "src"
    site.mkdir()
    beside.mkdir()
    (site / "outer.py").write_text("import inner\n")
    (site / "inner.py").write_text("WHO = 'installed'\n")
    script = beside / "train.py"
    script.write_text(
        "import outer, inner, robust_slurm, signal\n"
        "print(inner.WHO, flush=True)\nrobust_slurm.beat(1)\nsignal.pause()\n"
    )
    return [sys.executable, str(script)], beside / "inner.py"


def test_a_module_beside_the_script_is_not_taken_for_an_installed_one(
    drive: Any, tmp_path: Path
) -> None:
    words, beside = shadowing(tmp_path)
    beside.write_text(OWN)
    d = drive(*words, warm=True, path=str(tmp_path / "lib"), packages=["outer"])
    d.launch()
    d.wait(lambda: any(tmp_path.glob("1-0.modules")))
    d.wait(lambda: (d.base / "warm-off").read_text() != "")
    d.wait(lambda: len(d.below()) == 1)
    assert not d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "own\nown\n")


def test_nor_is_one_that_comes_there_later(drive: Any, tmp_path: Path) -> None:
    words, beside = shadowing(tmp_path)
    d = drive(*words, warm=True, path=str(tmp_path / "lib"), packages=["outer", "inner"])
    d.launch()
    d.wait_warm()
    beside.write_text(OWN)
    assert not d.launch(epoch=2).warm
    d.wait(lambda: d.stdout() == "installed\nown\n")


@pytest.fixture
def module(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module that is loaded."""
    name = "warm_refused_example"
    path = tmp_path / f"{name}.py"
    path.write_text("")
    sys.path.insert(0, str(tmp_path))
    try:
        yield __import__(name)
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop(name, None)


def test_a_slow_file_system_costs_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_AT_REQUEST", 0.0)
    seen = Sources(set(), "-c", time.time() + 1)
    looked = []
    stamp = sources._stamp
    monkeypatch.setattr(sources, "_stamp", lambda path: (looked.append(path), stamp(path))[1])
    seen.check_request("/nowhere")
    assert 0 < len(looked) < len(seen._seen)
    first = looked[:]
    seen.check_request("/nowhere")
    assert looked[len(first)] not in first  # it goes on with what was seen the longest ago
    monkeypatch.setattr(sources, "IDLE", 0.0)  # that is too long ago now
    with pytest.raises(RuntimeError, match="too slow"):
        seen.check_request("/nowhere")


def test_with_time_all_files_are_looked_at(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_AT_REQUEST", 60.0)
    seen = Sources(set(), "-c", time.time() + 1)
    seen.check_request("/nowhere")
    assert module.__file__ is not None
    Path(module.__file__).write_text("VALUE = 2\n")
    with pytest.raises(RuntimeError, match="has changed"):
        seen.check_request("/nowhere")


def test_a_rehearsal_sees_what_has_changed_and_judges_no_directory(
    module: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_AT_REQUEST", 60.0)
    seen = Sources(set(), "-c", time.time() + 1)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / f"{module.__name__}.py").touch()
    monkeypatch.chdir(beside)
    seen.rehearse()
    shutil.rmtree(beside)
    seen.rehearse()
    assert module.__file__ is not None
    Path(module.__file__).write_text("VALUE = 2\n")
    with pytest.raises(RuntimeError, match="has changed"):
        seen.rehearse()


def test_it_looks_while_nobody_asks(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "IDLE", 0.0)
    monkeypatch.setattr(sources, "_SLICE", 0.01)
    seen = Sources(set(), "-c", time.time() + 1)
    assert module.__file__ is not None
    Path(module.__file__).write_text("VALUE = 2\n")
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(RuntimeError, match="has changed"):
        warm._wait(ours, seen)


def test_what_has_changed_since_the_beginning(module: types.ModuleType) -> None:
    with pytest.raises(RuntimeError, match="has changed"):
        Sources(set(), "-c", 0.0)


@pytest.mark.parametrize(
    ("entry", "shadows"),
    [("{}.py", True), ("{}/__init__.py", True), ("{}/data.txt", False), ("{}.txt", False)],
)
def test_what_stands_before_a_module(
    module: types.ModuleType, tmp_path: Path, entry: str, shadows: bool
) -> None:
    directory = tmp_path / "beside"
    path = directory / entry.format(module.__name__)
    path.parent.mkdir(parents=True)
    path.write_text("")
    seen = Sources(set(), "beside/script.py", time.time() + 1)
    (directory / "script.py").touch()
    if shadows:
        with pytest.raises(RuntimeError, match="another module"):
            seen.check_request(str(tmp_path))
    else:
        seen.check_request(str(tmp_path))
    known = Sources({module.__name__}, "beside/script.py", time.time() + 1)
    known.check_request(str(tmp_path))


def test_a_module_that_the_rank_found_elsewhere(module: types.ModuleType) -> None:
    name = module.__name__
    assert module.__spec__ is not None and module.__spec__.origin is not None
    assert different([(name, module.__spec__.origin), ("not_loaded", "/x.py")]) == ""
    assert different([(name, "/elsewhere.py")]) == name


def test_a_list_of_imports_has_a_limit() -> None:
    learnt = Learnt(1, ("python",), {}, (("os", "frozen"),))
    assert unpack(pack(learnt)) == learnt
    for bad in (b"", b"x", pack(learnt)[:-9], zlib.compress(b" " * (9 << 20) + b"{}")):
        with pytest.raises(ValueError, match="invalid list of imports"):
            unpack(bad)


OURS = """
import sys
from robust_slurm.auto import importing
named = "robust_slurm.resizing.world", "robust_slurm.rejoin.entry"
here = importing.__file__.partition("auto")[0]
origins = here + "resizing/world.py", "/elsewhere/entry.py"
importing.import_all(list(zip(named, origins)), [])
print([name in sys.modules for name in named])
"""


def test_what_a_rank_imports_of_ours_is_imported_ahead() -> None:
    """The Checkpointer's hundred modules, for one; not those of another copy."""
    argv = [sys.executable, "-c", OURS]
    run = subprocess.run(
        argv, env={"PYTHONPATH": HERE}, check=True, timeout=60, capture_output=True
    )
    assert run.stdout == b"[True, False]\n"


ARROW = """
import os
from importlib.util import find_spec
from robust_slurm.auto import importing
importing.import_all([("pyarrow", find_spec("pyarrow").origin)], [])
assert len(os.listdir("/proc/self/task")) == 1
if os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
import pyarrow
from pyarrow import compute
pool = pyarrow.jemalloc_memory_pool() if "jemalloc" in pyarrow.supported_memory_backends() else None
array = pyarrow.array(range(1000), memory_pool=pool)
table = pyarrow.table({"a": array}).to_pandas() if find_spec("pandas") else None
assert compute.sum(array).as_py() == 499500
"""


@pytest.mark.parametrize("setting", ["", "background_thread:true"])
def test_pyarrow_is_imported_ahead_without_its_thread(setting: str) -> None:
    pytest.importorskip("pyarrow")
    env = {"PYTHONPATH": HERE, "OMP_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": setting}
    subprocess.run([sys.executable, "-c", ARROW], env=env, check=True, timeout=120)
