"""A robust.toml that cannot be used: the last one that could stays in force."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import broken_settings
import pytest

from health import settings
from health.admin import render
from health.node import rootfiles
from health.settings_file import END
from health.settings_last import keep


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A site in its dry run, of which the copy is kept."""
    path = tmp_path / "robust.toml"
    text = f"state_dir = '/s'\n[gate]\ndry_run = true\nspool = '{tmp_path}/spool'\n"
    path.write_text(f"{text}{END}\n")
    path.chmod(0o644)
    assert keep(str(path)) == ""
    return path


def _last(path: Path) -> Path:
    return path.with_name("robust.toml.last")


def _no_toml(path: Path) -> None:
    path.write_text("[gate]\ndry_run = true\nspool = \n")


def _endless(path: Path) -> None:
    path.write_text("a = " + "[" * 100_000)


def _vast(path: Path) -> None:
    path.write_text("a = " + "9" * 10_000)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_toml, "Invalid value (at line 3, column 9)"),
        (_endless, "recursion"),
        (_vast, "digits"),
        *broken_settings.UNSAFE,
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_of_a_broken_file_the_last_good_one_stays_in_force(
    toml: Path, spoil: Any, said: str
) -> None:
    good = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert good.gate["dry_run"] is True and good.problems == ()
    os.utime(_last(toml), (1e9, 1e9))
    spoil(toml)
    found = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert found._replace(problems=()) == good
    (problem,) = found.problems
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(1e9))
    assert problem.startswith(f"{toml}: ") and said in problem
    assert problem.endswith(f"; the settings of {when} are in force (robust.toml.last)")
    assert keep(str(toml)) == "" and _last(toml).stat().st_mtime == 1e9, "it stays as it was"


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_no_toml, "(robust.toml.last: Invalid value (at line 3, column 9))"),
        (broken_settings.by_others, "(robust.toml.last: can be written by others (mode 0664))"),
        (broken_settings.foreign, "(robust.toml.last: belongs to uid 12345, not to root)"),
        (broken_settings.link, "(robust.toml.last: is a link)"),
        (broken_settings.fifo, "(robust.toml.last: not a regular file)"),
        (lambda path: path.write_text(""), "(robust.toml.last: is empty)"),
        (Path.unlink, "(there is no robust.toml.last)"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_a_copy_is_trusted_no_more_than_the_file(toml: Path, spoil: Any, said: str) -> None:
    good = toml.read_text()
    spoil(_last(toml))
    _no_toml(toml)
    found = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert found._replace(problems=()) == settings.defaults(broken_settings.CHECKS)
    (problem,) = found.problems
    assert problem.endswith(f"(at line 3, column 9); the defaults apply {said}")
    toml.write_text(good)
    assert keep(str(toml)) == "", "and the next good file takes its place"
    assert _last(toml).read_text() == good and not _last(toml).is_symlink()


def test_a_file_written_in_part_is_a_broken_one(toml: Path) -> None:
    """Most cuts of a file are valid TOML too: 94 of 240 lost the dry run without a word."""
    text = render.robust_toml(broken_settings.CHECKS)
    whole = text.replace("# dry_run = false", "dry_run = true")
    whole = whole.replace('# [nodes."gpu[1-8]".gate]', '[nodes."n1".gate]\ndisabled = ["disk"]')
    toml.write_text(whole)
    good = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert good.gate["dry_run"] is True and good.gate["disabled"] == ["disk"]
    assert (good.problems, good.notes, keep(str(toml))) == ((), (), "")
    cut = [*range(1, len(whole) - 1, 97), len(whole) - 2]
    for size in cut:
        toml.write_text(whole[:size])
        found = settings.load(str(toml), "n1", broken_settings.CHECKS)
        assert found._replace(problems=()) == good, size
        (problem,) = found.problems
        assert "are in force (robust.toml.last)" in problem
        assert keep(str(toml)) == "" and _last(toml).read_text() == whole, size
    assert problem.startswith(f"{toml}: its last line is not `{END}`, so it may be written in part")
    assert problem.endswith(f"; if it is whole: echo '{END}' >>{toml}")
    toml.write_text(whole.rstrip())
    assert settings.load(str(toml), "n1", broken_settings.CHECKS) == good


def test_a_file_of_the_sites_own_is_used_with_a_note_until_a_copy_differs(toml: Path) -> None:
    """Written by hand or by a tool, without the end mark."""
    _last(toml).unlink()
    own = "[gate]\ndry_run = true\n"
    toml.write_text(own)
    for there in ("as there is no robust.toml.last to use", "as robust.toml.last is the same"):
        found = settings.load(str(toml), "n1", broken_settings.CHECKS)
        assert found.gate["dry_run"] is True and found.problems == found.notes
        (note,) = found.notes
        assert f"it is used, {there}; if it is whole: echo '{END}' >>{toml}" in note
        assert keep(str(toml)) == "" and _last(toml).read_text() == own
    toml.write_text("[gate]\ndry_run = false\n")
    found = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert found.gate["dry_run"] is True and found.notes == ()
    assert f"echo '{END}' >>{toml}" in found.problems[0]
    assert keep(str(toml)) == "" and _last(toml).read_text() == own
    with toml.open("a") as file:  # the cure
        file.write(f"{END}\n")
    found = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert found.gate["dry_run"] is False and (found.problems, found.notes) == ((), ())
    assert keep(str(toml)) == "" and END in _last(toml).read_text()


@pytest.mark.parametrize("named", [True, False])
def test_a_lost_file_is_a_broken_one(
    toml: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """The stub names the file or not: a dry run must not end because a file is gone."""
    monkeypatch.setattr(settings, "SITE_FILE", str(toml))
    path = str(toml) if named else None
    good = settings.load(path, "n1", broken_settings.CHECKS)
    toml.unlink()
    for _ in range(2):
        found = settings.load(path, "n1", broken_settings.CHECKS)
        assert found._replace(problems=()) == good and found.gate["dry_run"] is True
        (problem,) = found.problems
        assert problem.startswith(f"{toml}: No such file or directory; the settings of ")
        assert keep(str(toml)) == "" and _last(toml).exists(), "the sweep keeps the copy"


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_file_is_a_lost_one(toml: Path, text: str) -> None:
    """A full disk, or a power failure, leaves one where somebody edited it."""
    good = settings.load(str(toml), "n1", broken_settings.CHECKS)
    toml.write_text(text)
    for _ in range(2):
        found = settings.load(str(toml), "n1", broken_settings.CHECKS)
        assert found._replace(problems=()) == good and found.gate["dry_run"] is True
        (problem,) = found.problems
        assert problem.startswith(f"{toml}: is empty; the settings of ")
        assert keep(str(toml)) == "" and _last(toml).read_text(), "the sweep keeps the copy"
    _last(toml).unlink()
    plain = settings.defaults(broken_settings.CHECKS)
    assert settings.load(str(toml), "n1", broken_settings.CHECKS) == plain, "there was none"
    assert keep(str(toml)) == "" and not _last(toml).exists()


def test_who_wants_the_defaults_leaves_the_end_mark_or_removes_both(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SITE_FILE", str(toml))
    plain = settings.defaults(broken_settings.CHECKS)
    toml.write_text(f"{END}\n")
    assert settings.load(None, "n1", broken_settings.CHECKS) == plain
    assert keep(str(toml)) == ""
    assert settings.load(str(toml), "n1", broken_settings.CHECKS) == plain
    toml.unlink()
    _last(toml).unlink()
    assert settings.load(None, "n1", broken_settings.CHECKS) == plain
    assert keep(str(toml)) == "" and not _last(toml).exists()
    assert keep(str(toml.parent / "no-such-directory" / toml.name)) == ""


def test_the_copy_is_written_only_when_it_differs(toml: Path) -> None:
    last = _last(toml)
    assert last.read_bytes() == toml.read_bytes()
    first = last.stat()
    assert stat.S_IMODE(first.st_mode) == 0o644 and first.st_uid == os.geteuid()
    keep(str(toml))
    assert last.stat().st_ino == first.st_ino and last.stat().st_mtime == first.st_mtime
    other = f"[gate]\nenabled = false\n{END}\n"
    toml.write_text(other)
    keep(str(toml))
    assert last.read_text() == other
    toml.chmod(0o600)
    keep(str(toml))
    assert stat.S_IMODE(last.stat().st_mode) == 0o600, "no wider than the file"
    assert sorted(path.name for path in toml.parent.iterdir()) == ["robust.toml", last.name]


def test_one_bad_key_is_no_broken_file(toml: Path) -> None:
    toml.write_text(f"[gate]\ndry_run = 1\n{END}\n")
    found = settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert found.gate["dry_run"] is False
    assert found.problems == ("[gate.dry_run] = 1: use true or false; False stays",)


def test_a_good_file_costs_no_look_at_the_copy(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = rootfiles.open_file

    def open_file(directory: int, name: str, *more: int) -> int:
        opened.append(name)
        return real(directory, name, *more)

    monkeypatch.setattr(rootfiles, "open_file", open_file)
    settings.load(str(toml), "n1", broken_settings.CHECKS)
    assert opened == ["robust.toml"]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, ""),
        (errno.EACCES, ""),
        (errno.ENOSPC, "no copy kept: No space left on device"),
    ],
)
def test_where_the_copy_cannot_be_written(
    toml: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def replace(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rootfiles, "replace", replace)
    toml.write_text(f"# another\n{END}\n")
    assert keep(str(toml)) == (said and f"{_last(toml)}: {said}")
    assert "dry_run" in _last(toml).read_text()


def test_a_draft_that_was_left_behind_blocks_nothing(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    draft = tmp_path / f".a.{os.uname().nodename}.{os.getpid()}"
    directory = rootfiles.open_dir(str(tmp_path))
    try:
        for leave in (lambda: draft.write_text("half of i"), lambda: draft.symlink_to(victim)):
            leave()
            rootfiles.replace(directory, "a", b"whole")
            assert (tmp_path / "a").read_bytes() == b"whole" and not draft.is_symlink()
        draft.mkdir()
        with pytest.raises(OSError, match=r"\.a\."):
            rootfiles.replace(directory, "a", b"other")
        assert (tmp_path / "a").read_bytes() == b"whole"
    finally:
        os.close(directory)
    assert victim.read_text() == "mine"
