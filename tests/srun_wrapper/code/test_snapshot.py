"""Snapshots: right to the byte, never changed by what comes after, named by their content."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srun_wrapper.code import copying, snapshot
from srun_wrapper.code.copying import retarget
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.snapshot import Asked, largest, remove_tree, take
from srun_wrapper.code.versions import Version

GIT = ("git", "-c", "user.name=u", "-c", "user.email=u@h", "-c", "init.defaultBranch=main")


def asked(top: Path, earlier: str = "", exclude: tuple[str, ...] = (), limit: float = 1e9) -> Asked:
    return Asked(str(top / "proj"), str(top / "store"), exclude, limit, earlier)


def git(top: Path, *words: str) -> str:
    done = subprocess.run([*GIT, *words], cwd=top / "proj", check=True, capture_output=True)
    return done.stdout.decode().strip()


@pytest.fixture
def top(tmp_path: Path) -> Path:
    (tmp_path / "proj" / "pkg").mkdir(parents=True)
    (tmp_path / "proj" / "train.py").write_text("import pkg\n")
    (tmp_path / "proj" / "pkg" / "__init__.py").write_text("x = 1\n")
    return tmp_path


def content(folder: Path) -> dict[str, bytes | str]:
    """Return the files and links of a directory, with what they hold."""
    return {
        str(path.relative_to(folder)): str(path.readlink()) if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    }  # fmt: skip


def tree(top: Path, version: Version) -> Path:
    return top / "store" / version.id


NAMES = st.sampled_from(["a.py", "b.py", "d/a.py", "d/e/c.txt", "x", "run.sh"])
EDITS = st.lists(
    st.dictionaries(NAMES, st.none() | st.binary(max_size=40), min_size=1, max_size=4),
    min_size=1,
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(EDITS, st.booleans())
def test_each_snapshot_is_what_was_there_and_stays_so(
    edits: list[dict[str, bytes | None]], with_git: bool
) -> None:
    with tempfile.TemporaryDirectory() as made:
        top = Path(made)
        (top / "proj").mkdir()
        if with_git:
            git(top, "init", "-q")
        taken: list[tuple[Version, dict[str, bytes | str]]] = []
        for edit in edits:
            for name, data in edit.items():
                path = top / "proj" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                if data is not None:
                    path.write_bytes(data)
            (top / "proj" / "always.py").write_text("")
            there = content(top / "proj")
            there = {n: c for n, c in there.items() if not n.startswith(".git/")}
            version, _ = take(asked(top, taken[-1][0].id if taken else ""))
            taken.append((version, there))
        for version, there in taken:
            assert content(tree(top, version)) == there
        for one, there in taken:  # the same name means the same content, and the other way round
            assert all((one.id == other.id) == (there == was) for other, was in taken)
        own = {path.stat().st_ino for path in (top / "proj").rglob("*")}
        for path in (top / "store").rglob("*"):
            assert path.stat().st_ino not in own
            if path.is_file() and path.parent != top / "store":
                assert path.stat().st_mode & 0o222 == 0
        for version, _ in taken:
            remove_tree(tree(top, version))


def test_unchanged_files_are_shared_between_snapshots(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "RACY", 0)
    first, _ = take(asked(top))
    (top / "proj" / "train.py").write_text("import pkg, os\n")
    second, line = take(asked(top, first.id))
    assert first.id != second.id and "2 files, 1 of them copied" in line
    inode = lambda version, name: (tree(top, version) / name).stat().st_ino  # noqa: E731
    assert inode(first, "pkg/__init__.py") == inode(second, "pkg/__init__.py")
    assert inode(first, "train.py") != inode(second, "train.py")


def test_a_file_written_just_before_the_last_snapshot_is_read_again(top: Path) -> None:
    """The file's times may be the same after a second edit."""
    first, _ = take(asked(top))
    path = top / "proj" / "train.py"
    before = path.stat()
    path.write_text("import pkh\n")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    second, _ = take(asked(top, first.id))
    assert (tree(top, second) / "train.py").read_text() == "import pkh\n"


def test_git_decides_what_is_code(top: Path) -> None:
    proj = top / "proj"
    git(top, "init", "-q")
    (proj / ".gitignore").write_text("runs/\n*.log\n")
    (proj / "runs").mkdir()
    (proj / "runs" / "checkpoint").write_bytes(bytes(1000))
    (proj / "pkg" / "a.log").write_text("line\n")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "one")
    head = git(top, "rev-parse", "HEAD")
    version, line = take(asked(top, limit=500))
    assert version.id == head[:12] and version.commit == head and "git commit" in line
    found = tree(top, version)
    # Ignored files are the live ones: results stay where they were.
    assert (found / "runs").readlink() == proj / "runs"
    (found / "runs" / "new").write_text("x")
    assert (proj / "runs" / "new").exists()
    assert (found / "pkg" / "a.log").readlink() == proj / "pkg" / "a.log"
    assert not (found / ".git").exists()

    (proj / "new.py").write_text("y = 2\n")  # untracked
    other, line = take(asked(top, version.id))
    assert other.id.startswith("c-") and not other.commit and "content-addressed" in line
    assert (tree(top, other) / "new.py").read_text() == "y = 2\n"


def test_no_program_that_the_directory_names_lists_its_files(top: Path) -> None:
    git(top, "init", "-q")
    git(top, "config", "core.fsmonitor", f"touch {top}/ran")
    take(asked(top))
    assert not (top / "ran").exists()


def test_a_commit_with_a_file_that_git_was_told_to_hide_has_another_name(top: Path) -> None:
    git(top, "init", "-q")
    git(top, "add", "-A")
    git(top, "commit", "-qm", "one")
    first, _ = take(asked(top))
    git(top, "update-index", "--assume-unchanged", "train.py")
    (top / "proj" / "train.py").write_text("import pkg, os\n")
    second, _ = take(asked(top))
    assert first.commit and second.id.startswith("c-")
    assert (tree(top, second) / "train.py").read_text() == "import pkg, os\n"


def test_the_code_of_a_subdirectory_and_of_a_submodule(top: Path) -> None:
    proj = top / "proj"
    git(top, "init", "-q")
    (proj / "sub").mkdir()
    subprocess.run([*GIT, "init", "-q"], cwd=proj / "sub", check=True)
    (proj / "sub" / "s.py").write_text("s = 1\n")
    (proj / "sub" / ".gitignore").write_text("*.bin\n")
    (proj / "sub" / "big.bin").write_bytes(bytes(100))
    version, _ = take(asked(top))
    assert (tree(top, version) / "sub" / "s.py").read_text() == "s = 1\n"
    assert (tree(top, version) / "sub" / "big.bin").is_symlink()
    inner, _ = take(Asked(str(proj / "pkg"), str(top / "store"), (), 1e9))
    assert content(top / "store" / inner.id) == {"__init__.py": b"x = 1\n"}


def test_what_is_excluded_stays_live(top: Path) -> None:
    (top / "proj" / "runs").mkdir()
    (top / "proj" / "runs" / "big").write_bytes(bytes(1000))
    version, line = take(asked(top, exclude=("runs", "none"), limit=500))
    assert (tree(top, version) / "runs").readlink() == top / "proj" / "runs"
    assert "not a git repository" in line
    with pytest.raises(CodeError, match="not a path inside"):
        take(asked(top, exclude=("../x",)))


def test_ignored_paths_that_are_not_linked_are_counted(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    git(top, "init", "-q")
    (top / "proj" / ".gitignore").write_text("*.log\nruns/\n")
    for name in "abc":
        (top / "proj" / "pkg" / f"{name}.log").write_text("line\n")
    monkeypatch.setattr(snapshot, "MOST_LINKS", 3)
    assert "not linked" not in take(asked(top))[1]
    (top / "proj" / "runs").mkdir()
    (top / "proj" / "runs" / "1").write_text("x")
    version, line = take(asked(top))
    assert "; 1 ignored path more than 3 not linked to, so that the ranks do not find it: " in line
    assert "name whole folders" in line and not (tree(top, version) / "runs").exists()


def test_too_much_is_refused_with_the_largest_entries(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (top / "proj" / "checkpoint.pt").write_bytes(bytes(2_000_000))
    with pytest.raises(CodeError, match=r"has 2 MB, more than 1 MB .*checkpoint.pt \(2 MB\), "):
        take(asked(top, limit=1e6))
    monkeypatch.setattr(snapshot, "MOST_FILES", 2)
    with pytest.raises(CodeError, match="has 3 files, more than 2 files"):
        take(asked(top))
    assert largest({"a/b": 1, "a/c": 1, "d": 1}, by_bytes=False) == "a (2 files), d (1 file)"


def test_names_and_a_directory_without_code(top: Path) -> None:
    (top / "empty").mkdir()
    with pytest.raises(CodeError, match="has no files: give the directory of the program"):
        take(Asked(str(top / "empty"), str(top / "store"), (), 1e9))
    Path(os.fsdecode(os.fsencode(top / "proj") + b"/\xff.py")).write_text("x")
    with pytest.raises(CodeError, match=r"'\\udcff.py' in .* is not UTF-8"):
        take(asked(top))


def test_links_sockets_and_modes(top: Path) -> None:
    proj = top / "proj"
    (proj / "run.sh").write_text("#!/bin/sh\n")
    (proj / "run.sh").chmod(0o755)
    (proj / "inside").symlink_to("pkg")
    (proj / "absolute").symlink_to(proj / "train.py")
    (proj / "pkg" / "outside").symlink_to("../../data")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(proj / "sock"))
        version, line = take(asked(top))
    found = tree(top, version)
    assert (found / "run.sh").stat().st_mode & 0o777 == 0o555
    assert str((found / "inside").readlink()) == "pkg"
    assert str((found / "absolute").readlink()) == "train.py"
    assert (found / "pkg" / "outside").readlink() == top / "data"
    assert not (found / "sock").exists() and "left out: 1 sockets" in line
    assert found.stat().st_mode & 0o777 == 0o500
    assert (found / "pkg" / "__pycache__").stat().st_mode & 0o200  # Python may write there


@pytest.mark.parametrize(
    ("name", "to", "new"),
    [
        ("a", "b", "b"),
        ("d/a", "../b", "../b"),
        ("d/a", "/proj/b", "../b"),
        ("a", "../data", "/data"),
        ("a", "/data", "/data"),
        ("a", ".", "."),
    ],
)
def test_retarget(name: str, to: str, new: str) -> None:
    assert retarget(name, to, "/proj") == new


def test_an_edit_while_it_copies_is_never_half_in(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files of a snapshot were there at one moment: an edit of two files is whole or absent."""
    proj = top / "proj"
    inner = copying.FileCopier.copy
    edits = iter([1])

    def copy(self: copying.FileCopier, paths: object) -> None:
        inner(self, paths)  # type: ignore[arg-type]
        for _ in edits:
            (proj / "train.py").write_text("import pkg, new\n")
            (proj / "new.py").write_text("n = 1\n")
            (proj / "pkg" / "__init__.py").unlink()

    monkeypatch.setattr(copying.FileCopier, "copy", copy)
    version, _ = take(asked(top))
    assert content(tree(top, version)) == {"train.py": b"import pkg, new\n", "new.py": b"n = 1\n"}


def test_a_store_that_another_user_has_made_is_refused(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner could replace what the ranks run, and job ids are easily guessed."""
    (top / "store").mkdir(mode=0o777)
    uid = os.getuid()
    with monkeypatch.context() as other:
        other.setattr(os, "getuid", lambda: uid + 1)
        with pytest.raises(CodeError, match="another user's"):
            take(asked(top))
    (top / "store").rename(top / "away")
    (top / "store").symlink_to("away")
    with pytest.raises(CodeError, match="a link"):
        take(asked(top))
    assert not list((top / "away").iterdir())


def test_a_file_changed_just_before_it_was_read_is_read_again(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a file system may be too coarse for two edits."""
    monkeypatch.setattr(copying, "stamp_of", lambda info: (info.st_size, 0, 0, info.st_ino))
    first, _ = take(asked(top))
    (top / "proj" / "train.py").write_text("import pkG\n")
    second, _ = take(asked(top, first.id))
    assert content(tree(top, second))["train.py"] == b"import pkG\n"


def test_a_file_that_never_rests_is_named(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = top / "proj" / "train.py"
    inner = copying.FileCopier.changed

    def changed(self: copying.FileCopier, paths: object) -> set[str]:
        path.write_text(path.read_text() + "\n")
        return inner(self, paths)  # type: ignore[arg-type]

    monkeypatch.setattr(copying.FileCopier, "changed", changed)
    with pytest.raises(CodeError, match=r"change all the time \(train.py\)"):
        take(asked(top))
    assert not list((top / "store").glob(".tmp-*"))
