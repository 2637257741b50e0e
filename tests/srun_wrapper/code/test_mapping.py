"""A rank's command, directory and PYTHONPATH in terms of a snapshot."""

from __future__ import annotations

import pytest

from srun_wrapper.code.mapping import Mapping

COPIED = {".", "train.py", "run.sh", "conf", "conf/a.toml", "src", "src/pkg", "tools/go.sh"}
ELSEWHERE = {"/home/u/data", "/home/u"}


def mapping(old: str = "/home/u/proj") -> Mapping:
    real = lambda path: path.replace("/link/proj", "/home/u/proj")  # noqa: E731
    return Mapping("/home/u/proj", "/s/c-1", old, COPIED.__contains__, ELSEWHERE.__contains__, real)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("/home/u/proj", "/s/c-1"),
        ("/home/u/proj/src", "/s/c-1/src"),
        ("/link/proj", "/s/c-1"),
        ("/home/u/proj/runs", ""),  # git ignores it: it stays live
        ("/home/u", ""),
        ("/home/u/project", ""),
    ],
)
def test_the_directory(old: str, new: str) -> None:
    assert mapping(old).directory() == new


@pytest.mark.parametrize(
    ("old", "word", "new"),
    [
        # In the directory, relative words mean the snapshot by themselves.
        ("/home/u/proj", "train.py", "train.py"),
        ("/home/u/proj", "conf/a.toml", "conf/a.toml"),
        ("/home/u/proj", "/home/u/proj/train.py", "/s/c-1/train.py"),
        ("/home/u/proj", "/link/proj/train.py", "/s/c-1/train.py"),
        ("/home/u/proj", "--config=/home/u/proj/conf/a.toml", "--config=/s/c-1/conf/a.toml"),
        ("/home/u/proj", "--config=conf/a.toml", "--config=conf/a.toml"),
        ("/home/u/proj", "a.config=/home/u/proj/conf/a.toml", "a.config=/s/c-1/conf/a.toml"),
        # A path outside stays the same path, also where a relative word would mean another one now.
        ("/home/u/proj", "../data", "/home/u/data"),
        ("/home/u/proj", "--data=../data", "--data=/home/u/data"),
        ("/home/u/proj", "+data.dir=../data", "+data.dir=/home/u/data"),
        ("/home/u/proj", "../none", "../none"),
        ("/home/u/proj", "/home/u/data", "/home/u/data"),
        # Words of ignored files, and words that are no paths, stay.
        ("/home/u/proj", "/home/u/proj/.venv/bin/python", "/home/u/proj/.venv/bin/python"),
        ("/home/u/proj", "--out=/home/u/proj/runs/1", "--out=/home/u/proj/runs/1"),
        ("/home/u/proj", "0.1", "0.1"),
        ("/home/u/proj", "--lr=0.1", "--lr=0.1"),
        ("/home/u/proj", "-u", "-u"),
        # From outside, only words that name the directory change.
        ("/home/u", "proj/train.py", "/s/c-1/train.py"),
        ("/home/u", "train.py", "train.py"),
        ("/home/u", "../u/proj/run.sh", "/s/c-1/run.sh"),
        ("/home/u", "data", "data"),
    ],
)
def test_words(old: str, word: str, new: str) -> None:
    assert mapping(old).command(["python", word]) == ("python", new)


@pytest.mark.parametrize(
    ("program", "new"),
    [
        ("python", "python"),
        ("train.py", "train.py"),  # looked for on PATH, not here
        ("./run.sh", "./run.sh"),
        ("/home/u/proj/tools/go.sh", "/s/c-1/tools/go.sh"),
        ("/usr/bin/python3", "/usr/bin/python3"),
    ],
)
def test_the_program(program: str, new: str) -> None:
    assert mapping().command([program]) == (new,)


@pytest.mark.parametrize(
    ("value", "new"),
    [
        ("", ""),
        ("/opt/lib", "/opt/lib"),
        ("/home/u/proj/src:/opt/lib", "/s/c-1/src:/opt/lib"),
        ("src", "/s/c-1/src"),
        ("/opt/lib:", "/opt/lib:/s/c-1"),  # an empty entry is the working directory
        ("../data", "/home/u/data"),
        ("/home/u/proj/.venv/lib", "/home/u/proj/.venv/lib"),
    ],
)
def test_python_path(value: str, new: str) -> None:
    assert mapping().python_path(value) == new
