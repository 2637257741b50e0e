"""The script of a rank that is forked from an interpreter which was started with another one."""

from __future__ import annotations

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
