"""Look for the files that starting a rank needs, on a made node."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from srun_wrapper.agent import needed_files
from srun_wrapper.agent.filesystems import UsedMount
from srun_wrapper.protocol.file_messages import FindFiles


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node with a program, a script, data, an output of its own, and /home from elsewhere."""
    home = tmp_path / "home"
    for directory in (home / "data", tmp_path / "bin"):
        directory.mkdir(parents=True)
    for name in ("home/train.py", "home/log", "home/data/0", "bin/python", "out", "home/0.5"):
        (tmp_path / name).touch()
    (tmp_path / "bin/python").chmod(0o755)
    mounts = [UsedMount("/", "ext4"), UsedMount(str(home / "data"), "nfs4")]
    monkeypatch.setattr(needed_files, "own_mounts", lambda: mounts)
    return tmp_path


def found(node: Path, *words: str, paths: tuple[str, ...] = ()) -> dict[str, bool]:
    env = {"PATH": str(node / "bin")}
    answer = needed_files.find(FindFiles(7, words, paths, 5.0), str(node / "home"), env)
    assert answer.token == 7 and not answer.silent
    return {str(Path(f.path).relative_to(node)): f.there for f in answer.files}


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (["python", "train.py"], {"home/train.py"}),
        (["python", "-u", "./train.py", "--log", "../out"], {"home/train.py"}),
        (["python", "train.py", "--data=data/0"], {"home/train.py", "home/data/0"}),
        (["python", "train.py", "data", "data/9"], {"home/train.py", "home/data"}),
        (["python", "-m", "train", "log"], set()),
        (["python", "-c", "x" * 9000, "data/0"], {"home/data/0"}),
        (["python", "8", "train.py"], {"home/train.py"}),
        (["python", "\0", "data"], {"home/data"}),
    ],
)
def test_of_a_command_the_program_its_script_and_what_others_serve(
    node: Path, words: list[str], more: set[str]
) -> None:
    assert found(node, *words) == dict.fromkeys({"bin/python", *more}, True)


def test_files_that_are_asked_for_are_there_or_not(node: Path) -> None:
    paths = (str(node / "home"), "train.py", str(node / "gone"), str(node / "out/below"))
    want = {"home": True, "home/train.py": True, "gone": False, "out/below": False}
    assert found(node, paths=paths) == want
    assert found(node, "nosuch") == {}


def test_files_on_a_mount_that_does_not_answer_are_left_out(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mount = str(node / "home/data")
    monkeypatch.setattr(needed_files, "silent", lambda points, _seconds: tuple(points))
    looked: list[str] = []
    monkeypatch.setattr(needed_files, "_kind", lambda path: looked.append(path) or stat.S_IFREG)
    answer = needed_files.find(FindFiles(1, (), ("data/0", "train.py")), str(node / "home"), {})
    assert answer.silent == (mount,) and looked == [str(node / "home/train.py")]
    assert [file.path for file in answer.files] == looked
