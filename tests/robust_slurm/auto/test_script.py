"""The script of a rank that is forked from an interpreter which was started with another one."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from robust_slurm.auto import script
from robust_slurm.auto.script import Script


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two versions; the interpreter has been started in the first."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for file in ("train.py", "train"):
            (tmp_path / name / file).touch()
    (tmp_path / "link").symlink_to("two")
    monkeypatch.chdir(tmp_path / "one")
    return tmp_path


def made(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Script:
    monkeypatch.setattr(sys, "argv", argv)
    return Script()


@pytest.mark.parametrize(
    ("given", "words", "directory", "found"),
    [
        ("train.py", ["python", "train.py", "x"], "two", "two/train.py"),
        ("./train.py", ["./train.py", "x"], "two", "two/./train.py"),
        ("train.py", ["python", "train.py", "x"], "link", "two/train.py"),  # as getcwd has it
        ("{}/one/train.py", ["python", "{}/two/train.py", "x"], "one", "{}/two/train.py"),
        ("{}/one/train.py", ["train.py", "x"], "two", "{}/one/train.py"),  # looked up in PATH
        ("-m", ["python", "-m", "train", "x"], "two", None),
        ("-c", ["python", "-c", "pass", "x"], "two", None),
        ("", ["python", "x"], "two", None),
    ],
)
def test_its_path(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: str,
    words: list[str],
    directory: str,
    found: str | None,
) -> None:
    one = made([given.format(place), "x"], monkeypatch)
    path = one.of([word.format(place) for word in words], str(place / directory))
    assert path == (
        "" if found is None else f"{place}/{found.format(place).removeprefix(f'{place}/')}"
    )
    one.check(path, ahead=False)


@pytest.mark.parametrize(
    ("path", "refused"),
    [("two/train.py", False), ("two/train", True), ("two/gone.py", True), ("two", True),
     ("one/train.py", False), ("one/train", True)],
)  # fmt: skip
def test_what_cannot_be_run_in_its_place(
    place: Path, monkeypatch: pytest.MonkeyPatch, path: str, refused: bool
) -> None:
    one = made(["train.py"], monkeypatch)
    if refused:
        with pytest.raises(RuntimeError, match="another file"):
            one.check(str(place / path), ahead=False)
    else:
        one.check(str(place / path), ahead=False)


def test_an_untried_interpreter_and_a_run_ahead_have_their_own_script_only(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(["train.py"], monkeypatch)
    with pytest.raises(RuntimeError, match="another file"):
        one.check(str(place / "two/train.py"), ahead=True)
    one.check(str(place / "one/train.py"), ahead=True)
    monkeypatch.setattr(script, "_TRIED", ((3, 9), (3, 10)))
    with pytest.raises(RuntimeError, match="another file"):
        one.check(str(place / "two/train.py"), ahead=False)
    one.check(str(place / "one/train.py"), ahead=False)


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("import os\nos.environ['A'] = '1'\n", "import os\n\nos.environ['A'] = '1'  # why\n", True),
        ("import os\nos.environ['A'] = '1'\n", "import os\nos.environ['A'] = '2'\n", False),
        ("x = 1\n", "import os\nos.environ.setdefault('A', '1')\n", False),
        ("x = 1\n", "def f():\n    os.environ.update(\n        A='1'\n    )\n", False),
        ("x = 1\n", "from os import putenv\nputenv('A', '1')\n", False),
        ("x = 1\n", "del os.environ['A']\n", False),
        ("x = 1\n", "r = int(os.environ['RANK'])\nw = os.environ.get('WORLD_SIZE')\n", True),
        ("x = 1\n", "run(env=dict(os.environ))\n", False),  # may be anything
        ("x = 1\n", "x = 2\n", True),
        ("x = 1\n", "x = (\n", False),
    ],
)
def test_what_a_script_does_to_its_environment(
    place: Path, monkeypatch: pytest.MonkeyPatch, one: str, two: str, same: bool
) -> None:
    (place / "one/train.py").write_text(one)
    (place / "two/train.py").write_text(two)
    for given, words in (
        ("train.py", ["python", "train.py", "x"]),
        ("-m", ["python", "-m", "train", "x"]),
    ):
        script = made([given, "x"], monkeypatch)
        script.begin(words)
        script.check_settings(words, str(place / "one"))
        if same:
            script.check_settings(words, str(place / "two"))
        else:
            with pytest.raises(RuntimeError, match="sets its environment"):
                script.check_settings(words, str(place / "two"))


def test_a_python_that_spells_the_path_otherwise(place: Path) -> None:
    """The script that it was started with must never run in place of another version's."""
    started, hooks = f"{place}/one/./train.py", list(sys.path_hooks)
    run = runpy._run_module_as_main  # type: ignore[attr-defined]
    try:
        script.run_instead(started, f"{place}/two/train.py")
        hook = sys.path_hooks[0]
        with pytest.raises(ImportError):
            hook(f"{place}/one/train")
        assert hook(f"{place}/one/train.py") is hook
    finally:
        sys.path_hooks[:] = hooks
        runpy.__dict__.pop("__getattr__", None)
        runpy.__dict__["_run_module_as_main"] = run
