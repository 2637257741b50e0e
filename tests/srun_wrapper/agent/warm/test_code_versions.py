"""A rank runs the version of the code that its start names, also from a warm interpreter."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import slot_driver
from msgspec import structs
from places import PROGRAMS

from robust_slurm.auto.snapshot_paths import SOURCE, STORE, TREE
from robust_slurm.auto.sources import Sources
from srun_wrapper.agent.warm.commands import same_start
from srun_wrapper.protocol.code import Code
from srun_wrapper.protocol.messages import Exited

drivers, drive = slot_driver.drivers, slot_driver.drive
SCRIPT = """
import os, signal, sys
import mine
print(SCRIPT, mine.NAME, os.environ["ROBUST_CODE_VERSION"],
      os.getcwd() == os.environ["ROBUST_CODE_TREE"], sys.argv[1], flush=True)
import robust_slurm
robust_slurm.beat(1)
signal.pause()
"""


SPAWN = """
def child():
    print("child", mine.NAME, __name__, flush=True)
if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


def version(top: Path, name: str, lib: str = "", program: tuple[str, ...] = ("train.py",)) -> Code:
    """A snapshot whose module of its own is beside the script, or in ``lib``."""
    tree = top / "store" / f"c-{name}"
    (tree / lib).mkdir(parents=True)
    (tree / "train.py").write_text(f"SCRIPT = {name!r}\n{SCRIPT}")
    (tree / lib / "mine.py").write_text(f"NAME = {name!r}\n")
    path = {"PYTHONPATH": str(tree / lib) if lib else "/none"}
    words = (sys.executable, *program, f"--run={name}")
    store, source = str(tree.parent), str(top / "proj")
    return Code(f"c-{name}", source, store, str(tree), str(tree), words, path)


def test_a_script_is_the_versions_own(drive: Any, tmp_path: Path) -> None:
    """Python has made its path absolute when a warm interpreter was started."""
    one, two = version(tmp_path, "one"), version(tmp_path, "two")
    d = drive(*one.command, warm=True, stand_in=0.0)
    assert not d.launch(code=one).warm
    d.wait_warm()
    d.wait(lambda: (d.base / "stand-in").read_text() != "0")
    assert d.launch(epoch=2, code=one).warm
    d.wait(lambda: d.stdout() == "one one c-one True --run=one\n" * 2)
    assert d.launch(epoch=3, code=two).warm
    d.wait(lambda: d.stdout().endswith("two two c-two True --run=two\n"))
    assert d.launch(epoch=4, code=one).warm  # back
    d.wait(lambda: d.stdout().endswith("one one c-one True --run=one\n"))


@pytest.mark.parametrize("program", ["./train.py", "{tree}/link.py"])
def test_a_script_sees_what_a_fresh_process_of_its_version_sees(
    drive: Any, tmp_path: Path, program: str
) -> None:
    versions = []
    for name in ("one", "two"):
        tree = tmp_path / "store" / f"c-{name}"
        versions.append(version(tmp_path, name, program=(program.format(tree=tree), "wait")))
        shutil.copy(PROGRAMS / "warm_facts.py", tree / "train.py")
        (tree / "lib").mkdir()
        shutil.copy(PROGRAMS / "warm_facts.py", tree / "lib" / "linked.py")
        (tree / "link.py").symlink_to("lib/linked.py")
    one, two = (structs.replace(v, command=(*v.command[:-1], "--run=x")) for v in versions)
    d = drive(*one.command, warm=True, stand_in=0.0)
    assert not d.launch(code=one).warm
    d.wait_warm()
    assert d.launch(epoch=2, code=two).warm
    d.wait(lambda: d.stdout().count("\n") == 2)
    fresh, forked = d.stdout().splitlines()
    assert json.loads(forked) == json.loads(fresh.replace("c-one", "c-two"))


@pytest.mark.parametrize(
    ("text", "code", "signum"),
    [
        ("raise ValueError(mine.NAME)", 1, None),
        ("raise KeyboardInterrupt", None, 2),
        ("sys.exit(3)", 3, None),
        (SPAWN, 0, None),
    ],
)
def test_how_a_script_of_another_version_ends(
    drive: Any, tmp_path: Path, text: str, code: int | None, signum: int | None
) -> None:
    one, two = version(tmp_path, "one"), version(tmp_path, "two")
    (Path(two.tree) / "train.py").write_text(f"import sys\nimport mine\n{text}\n")
    d = drive(*one.command, warm=True)
    d.launch(code=one)
    d.wait_warm()
    assert d.launch(epoch=2, code=two).warm
    exited = d.get(Exited)
    assert (exited.code, exited.signal) == (code, signum), d.stderr()
    if code == 1:
        place = f'File "{two.tree}/train.py", line 3, in <module>'
        said = f"Traceback (most recent call last):\n  {place}\n    {text}\nValueError: two\n"
        assert exited.tail.endswith(said)
    if code == 0:
        d.wait(lambda: d.stdout().endswith("child two __mp_main__\n"))


def test_a_module_runs_warm_in_each_version(drive: Any, tmp_path: Path) -> None:
    one, two = (version(tmp_path, name, program=("-m", "train")) for name in ("one", "two"))
    d = drive(*one.command, warm=True, stand_in=0.0, packages=["mine"])
    assert not d.launch(code=one).warm
    d.wait(lambda: d.stdout() == "one one c-one True --run=one\n")
    d.wait_warm()
    d.wait(lambda: (d.base / "stand-in").read_text() != "0")
    assert d.launch(epoch=2, code=two).warm
    d.wait(lambda: d.stdout().endswith("two two c-two True --run=two\n"))
    assert d.launch(epoch=3, code=one).warm  # back
    d.wait(lambda: d.stdout().endswith("one one c-one True --run=one\n"))


def test_an_interpreter_that_has_imported_the_users_modules_is_not_used(
    drive: Any, tmp_path: Path
) -> None:
    one, two = version(tmp_path, "one", "lib"), version(tmp_path, "two", "lib")
    d = drive(*one.command, warm=True, stand_in=0.0, packages=["mine"])
    d.launch(code=one)
    d.wait_warm()
    assert d.launch(epoch=2, code=one).warm
    d.wait(lambda: d.stdout() == "one one c-one True --run=one\n" * 2)
    assert not d.launch(epoch=3, code=two).warm
    d.wait(lambda: d.stdout().endswith("two two c-two True --run=two\n"))
    d.wait_warm()  # with the modules of the new version
    assert d.launch(epoch=4, code=two).warm
    d.wait(lambda: d.stdout().endswith("two two c-two True --run=two\n" * 2))


def test_a_spawned_child_imports_from_the_versions_own_directory(
    drive: Any, tmp_path: Path
) -> None:
    """multiprocessing notes the directory when it is imported, which was in another version."""
    one, two = version(tmp_path, "one"), version(tmp_path, "two")
    first = Path(one.tree) / "train.py"
    first.write_text(f"import multiprocessing\n{first.read_text()}")
    text = f"import sys\nif __name__ == '__main__':\n    sys.path[0] = ''\nimport mine\n{SPAWN}"
    (Path(two.tree) / "train.py").write_text(text)
    d = drive(*one.command, warm=True)
    d.launch(code=one)
    d.wait_warm()
    assert d.launch(epoch=2, code=two).warm
    d.wait(lambda: "child" in d.stdout())
    assert d.stdout().endswith("child two __mp_main__\n")


@pytest.mark.parametrize("program", ["train.py", "-m train"])
def test_a_version_that_sets_its_environment_otherwise_starts_cold(
    drive: Any, tmp_path: Path, program: str
) -> None:
    """A module that reads it when it is imported has read what the version before had set."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "reads.py").write_text("import os\nSEEN = os.environ.get('SETTING')\n")
    codes = []
    for name in ("one", "two"):
        code = version(tmp_path, name, program=tuple(program.split()))
        script = Path(code.tree) / "train.py"
        head = f"import os\nos.environ['SETTING'] = {name!r}\nimport reads\nprint(reads.SEEN)\n"
        script.write_text(head + script.read_text())
        codes.append(structs.replace(code, environ={"PYTHONPATH": str(tmp_path / "lib")}))
    one, two = codes
    d = drive(*one.command, warm=True, packages=["reads"])
    d.launch(code=one)
    d.wait_warm()
    assert d.launch(epoch=2, code=one).warm
    assert not d.launch(epoch=3, code=two).warm
    d.wait(lambda: d.stdout().endswith("--run=two\n"))
    assert d.stdout().splitlines()[-2] == "two"


def test_a_module_that_was_imported_through_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An editable install may name the directory through one."""
    name = "code_versions_example"
    for tree in ("proj", "store/c-2"):
        (tmp_path / tree).mkdir(parents=True)
        (tmp_path / tree / f"{name}.py").touch()
    (tmp_path / "home").symlink_to(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "home" / "proj"))
    monkeypatch.setitem(sys.modules, name, importlib.import_module(name))
    places = {SOURCE: "proj", STORE: "store", TREE: "store/c-2"}
    with pytest.raises(RuntimeError, match=f"proj/{name}.py is of another version"):
        Sources(set(), "-c", time.time() + 1).check_code(
            {variable: str(tmp_path / path) for variable, path in places.items()}
        )


@pytest.mark.parametrize(
    ("module", "wrong"),
    [("/s/c-1/mine.py", True), ("/s/c-2/mine.py", False), ("/usr/lib/json.py", False),
     ("/s/c-22/mine.py", True)],
)  # fmt: skip
def test_a_loaded_module_of_another_version_is_refused(module: str, wrong: bool) -> None:
    sources = Sources.__new__(Sources)
    sources._seen = deque([(module, (0, 0, 0, 0), 0.0)])
    sources._portions = sources._real = ()
    environ = {STORE: "/s", TREE: "/s/c-2"}
    sources.check_code({})
    if wrong:
        with pytest.raises(RuntimeError, match="another version"):
            sources.check_code(environ)
    else:
        sources.check_code(environ)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (("python", "/s/c-2/train.py", "--lr=2"), True),
        (("python", "/s/c-2/other.py", "--lr=1"), False),
        (("python", "/s/c-1/train.py", "--lr=1"), False),  # not of the rank's own snapshot
        (("python", "/home/train.py", "--lr=1"), False),
        (("python", "train.py", "--lr=1"), False),
        (("python", "-u", "/s/c-2/train.py", "--lr=1"), False),
        (("/s/c-2/python", "/s/c-2/train.py", "--lr=1"), False),
    ],
)
def test_the_same_script_of_another_snapshot(words: tuple[str, ...], same: bool) -> None:
    started = ("python", "/s/c-1/train.py", "--lr=1"), {TREE: "/s/c-1"}
    assert same_start(started, (words, {TREE: "/s/c-2"}), 1) == same
