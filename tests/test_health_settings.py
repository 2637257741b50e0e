"""robust.toml as the gate reads it: defaults, nodes, bad keys, files that must not be used."""

from __future__ import annotations

import errno
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health import rootfiles, settings
from health.check import Check, Setting
from health.settings import Settings
from health.settings_last import keep

CHECKS = (
    Check(
        "disk",
        lambda system: [],
        (),
        {
            "minimum": Setting(5.0, "free space", "GiB"),
            "paths": Setting(["/"], "what to look at"),
            "strict": Setting(False, "all of it"),
            "count": Setting(-1, "how many"),
            "kind": Setting("any", "which"),
            "limits": Setting({"/": 1.0}, "by path", "GiB"),
            "free": Setting({}, "anything"),
        },
    ),
    Check("xid", lambda system: [], (), {"days": Setting(7, "looks back")}),
)


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def loaded(text: str, node: str = "gpu3") -> Settings:
        path = tmp_path / "robust.toml"
        path.write_text(text)
        path.chmod(0o644)
        return settings.load(str(path), node, CHECKS)

    return loaded


def test_a_site_that_says_nothing_has_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SITE_FILE", str(tmp_path / "absent.toml"))
    found = settings.load(None, "n1", CHECKS)
    assert found == settings.defaults(CHECKS)
    assert found.problems == () and found.state_dir == ""
    assert found.gate["enabled"] is True and found.families["disk"]["minimum"] == 5.0


@pytest.mark.parametrize(
    ("text", "table", "key", "value"),
    [
        ("[gate]\nenabled = false", "gate", "enabled", False),
        ("[gate]\nprolog_deadline = 4", "gate", "prolog_deadline", 4.0),
        ('[gate]\ndisabled = ["mounts", "ib-errors"]', "gate", "disabled", ["mounts", "ib-errors"]),
        ('[gate]\nslurm_bin = "/opt/slurm/bin"', "gate", "slurm_bin", "/opt/slurm/bin"),
        ("[breaker]\nmax_nodes = 0", "breaker", "max_nodes", 0),
        ('[epilog]\nleftovers = "never"', "epilog", "leftovers", "never"),
        ('[accusations]\ntests = ["/opt/t --all"]', "accusations", "tests", ["/opt/t --all"]),
        ("[health.disk]\nminimum = 2", "disk", "minimum", 2.0),
        ('[health.disk]\npaths = ["/a"]', "disk", "paths", ["/a"]),
        ("[health.disk]\ncount = 8", "disk", "count", 8),
        ("[health.disk]\ncount = -2", "disk", "count", -2),  # what it means is the family's matter
        ('[health.disk.limits]\n"/tmp" = 3', "disk", "limits", {"/tmp": 3.0}),
        ('[health.disk.free]\na = "x"', "disk", "free", {"a": "x"}),
        ('[nodes."gpu[1-8]".health.disk]\ncount = 1', "disk", "count", 1),
        ('[nodes."gpu[4-8]".health.disk]\ncount = 1', "disk", "count", -1),
        ('[nodes."gpu3".gate]\ndry_run = true', "gate", "dry_run", True),
        (
            '[nodes."gpu[1-8]".health.disk]\ncount = 1\n[nodes.gpu3.health.disk]\ncount = 2',
            "disk",
            "count",
            2,
        ),
        # What is said for some nodes wins, wherever it stands.
        ('[nodes."gpu3".health.disk]\ncount = 1\n[health.disk]\ncount = 2', "disk", "count", 1),
    ],
)
def test_the_sites_word_is_laid_over_the_defaults(
    load: Any, text: str, table: str, key: str, value: object
) -> None:
    found = load(text)
    assert found.problems == ()
    tables = found.families if table in found.families else found._asdict()
    assert tables[table][key] == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[gate]\nenabled = 1", "[gate.enabled] = 1: use true or false; True stays"),
        ("[gate]\nprolog_deadline = 0", "must be above 0; 8.0 stays"),
        ("[gate]\nprolog_deadline = nan", "not a usable number"),
        ('[gate]\nprolog_deadline = "8"', "not a number"),
        ("[gate]\ndisabled = [1]", "not a list of strings"),
        ('[gate]\nspool = "spool"', "not an absolute path"),
        ('[gate]\nspool = ""', "not an absolute path"),
        ('[gate]\nslurm_bin = "bin"', "not an absolute path"),
        ("[gate]\nprolog_dedline = 3", "is unknown; did you mean prolog_deadline?"),
        ("[gates]\nenabled = false", "[gates] is unknown; did you mean gate?"),
        ("[breaker]\nmax_nodes = -1", "must not be below 0"),
        ("[breaker]\nmax_nodes = 1.5", "not a whole number"),
        ('[epilog]\nleftovers = "all"', "use one of user, job, never"),
        ('[epilog]\nclean_dirs = ["tmp"]', "not an absolute path"),
        ("[health]\ndisk = 3", "[health.disk] is not a table"),
        ("[health.dusk]\na = 3", "[health.dusk] is unknown; did you mean disk?"),
        ("[health.disk]\nminimun = 3", "did you mean minimum?"),
        ("[health.disk]\nkind = 3", "not a string"),
        ('[health.disk.limits]\n"/tmp" = "3"', "/tmp: not a number"),
        ("[health.disk.free]\na = []", "a: neither a string nor a number"),
        ('[xid]\n79 = "explode"', "'explode' is none of none, clear-leftovers"),
        ("[xid]\n79 = []", "is none of none"),
        ('[xid]\n"seventy" = "none"', "is not the number of an Xid"),
        ('[nodes."gpu[1-".gate]\nenabled = false', "is no list of hosts"),
        ("nodes = 3", "[nodes] is not a table"),
        ("[nodes]\ngpu3 = 3", "is not a table"),
        ("[nodes.gpu3]\ngate = 3", '[nodes."gpu3".gate] is not a table'),
        ('state_dir = "shared"', "not an absolute path; no shared ledger"),
        ("[gate\n", "the defaults apply"),
    ],
)
def test_what_does_not_fit_keeps_its_default_and_is_said(load: Any, text: str, said: str) -> None:
    found = load(text)
    assert len(found.problems) == 1 and said in found.problems[0]
    assert found._replace(problems=()) == settings.defaults(CHECKS)


def test_a_bad_key_takes_nothing_else_with_it(load: Any) -> None:
    found = load("[gate]\ndry_run = true\nenabled = 7\n[lemon]\nstrikes = 9")
    assert found.gate["dry_run"] is True and found.lemon["strikes"] == 9
    assert len(found.problems) == 1


@pytest.mark.parametrize(
    ("text", "state_dir"),
    [
        ('state_dir = "/shared/robust/"', "/shared/robust"),
        ('state_dir = ""', ""),
        ('state_dir = "~/.robust-slurm"', ""),
        ("spares = 2", ""),  # robust-srun's key: not ours to judge
    ],
)
def test_of_the_top_level_only_state_dir_is_read(load: Any, text: str, state_dir: str) -> None:
    found = load(text)
    assert found.state_dir == state_dir and found.problems == ()


def test_the_xid_check_gets_the_sites_table(load: Any) -> None:
    found = load('[xid]\n"079" = "service"\n63 = "none"\n[health.xid]\ndays = 3')
    assert found.options("xid") == {"days": 3, "overrides": {"79": "service", "63": "none"}}
    assert "overrides" not in found.options("disk")
    own = found._replace(families={"xid": {"overrides": {"63": "reboot", "92": "none"}}})
    assert own.options("xid")["overrides"] == {"79": "service", "63": "none", "92": "none"}


def test_the_deep_look_has_the_sweeps_deadline() -> None:
    found = settings.defaults(CHECKS)
    assert [found.deadline(w) for w in ("prolog", "epilog", "sweep", "deep")] == [8, 30, 50, 50]


def _by_others(path: Path) -> None:
    path.chmod(0o664)


def _foreign(path: Path) -> None:
    os.chown(path, 12345, 12345)


def _link(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o644)


def _huge(path: Path) -> None:
    path.write_bytes(b"#" * (settings.FILE_LIMIT + 1))


def _binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def _in_open_directory(path: Path) -> None:
    path.parent.chmod(0o777)


UNSAFE = [
    (_by_others, "can be written by others"),
    (_foreign, "belongs to uid 12345"),
    (_link, "is a link"),
    (_fifo, "not a regular file"),
    (_huge, "larger than"),
    (_binary, "invalid start byte"),
]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *UNSAFE,
        (_in_open_directory, "can be written by others"),
        (Path.unlink, "no such file"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_an_unsafe_file_is_not_used(tmp_path: Path, spoil: Any, said: str) -> None:
    path = tmp_path / "robust.toml"
    path.write_text("[gate]\nenabled = false\n")
    path.chmod(0o644)
    spoil(path)
    found = settings.load(str(path), "n1", CHECKS)
    assert found.gate["enabled"] is True
    assert len(found.problems) == 1 and said in found.problems[0]


# -- the last file that could be used ---------------------------------------------------------


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """A site in its dry run, of which the copy is kept."""
    path = tmp_path / "robust.toml"
    path.write_text(f"state_dir = '/s'\n[gate]\ndry_run = true\nspool = '{tmp_path}/spool'\n")
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
        *UNSAFE,
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_of_a_broken_file_the_last_good_one_stays_in_force(
    toml: Path, spoil: Any, said: str
) -> None:
    good = settings.load(str(toml), "n1", CHECKS)
    assert good.gate["dry_run"] is True and good.problems == ()
    os.utime(_last(toml), (1e9, 1e9))
    spoil(toml)
    found = settings.load(str(toml), "n1", CHECKS)
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
        (_by_others, "(robust.toml.last: can be written by others (mode 0664))"),
        (_foreign, "(robust.toml.last: belongs to uid 12345, not to root)"),
        (_link, "(robust.toml.last: is a link)"),
        (_fifo, "(robust.toml.last: not a regular file)"),
        (lambda path: path.write_text(""), "(robust.toml.last: is empty)"),
        (Path.unlink, "(there is no robust.toml.last)"),
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others")
def test_a_copy_is_trusted_no_more_than_the_file(toml: Path, spoil: Any, said: str) -> None:
    good = toml.read_text()
    spoil(_last(toml))
    _no_toml(toml)
    found = settings.load(str(toml), "n1", CHECKS)
    assert found._replace(problems=()) == settings.defaults(CHECKS)
    (problem,) = found.problems
    assert problem.endswith(f"(at line 3, column 9); the defaults apply {said}")
    toml.write_text(good)
    assert keep(str(toml)) == "", "and the next good file takes its place"
    assert _last(toml).read_text() == good and not _last(toml).is_symlink()


def test_a_deleted_file_is_no_broken_one(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml.unlink()
    monkeypatch.setattr(settings, "SITE_FILE", str(toml))
    assert settings.load(None, "n1", CHECKS) == settings.defaults(CHECKS)
    assert _last(toml).exists()
    assert keep(str(toml)) == "" and not _last(toml).exists()
    assert keep(str(toml)) == ""
    assert keep(str(toml.parent / "no-such-directory" / toml.name)) == ""


def test_the_copy_is_written_only_when_it_differs(toml: Path) -> None:
    last = _last(toml)
    assert last.read_bytes() == toml.read_bytes()
    first = last.stat()
    assert stat.S_IMODE(first.st_mode) == 0o644 and first.st_uid == os.geteuid()
    keep(str(toml))
    assert last.stat().st_ino == first.st_ino and last.stat().st_mtime == first.st_mtime
    toml.write_text("[gate]\nenabled = false\n")
    keep(str(toml))
    assert last.read_text() == "[gate]\nenabled = false\n"
    toml.chmod(0o600)
    keep(str(toml))
    assert stat.S_IMODE(last.stat().st_mode) == 0o600, "no wider than the file"
    assert sorted(path.name for path in toml.parent.iterdir()) == ["robust.toml", last.name]


def test_one_bad_key_is_no_broken_file(toml: Path) -> None:
    toml.write_text("[gate]\ndry_run = 1\n")
    found = settings.load(str(toml), "n1", CHECKS)
    assert found.gate["dry_run"] is False
    assert found.problems == ("[gate.dry_run] = 1: use true or false; False stays",)


def test_a_good_file_costs_no_look_at_the_copy(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real = rootfiles.open_file

    def open_file(directory: int, name: str, *more: int) -> int:
        opened.append(name)
        return real(directory, name, *more)

    monkeypatch.setattr(rootfiles, "open_file", open_file)
    settings.load(str(toml), "n1", CHECKS)
    assert opened == ["robust.toml"]


@pytest.mark.parametrize(
    ("number", "said"),
    [(errno.EROFS, ""), (errno.EACCES, ""), (errno.ENOSPC, "not kept: No space left on device")],
)
def test_where_the_copy_cannot_be_written(
    toml: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    def replace(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(rootfiles, "replace", replace)
    toml.write_text("# another\n")
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


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_value_is_taken_in_its_type_or_refused(value: object) -> None:
    from health.settings_merge import fit

    for default in (True, 1, 1.5, "x", ["x"], {"x": 1.0}):
        taken, wrong = fit(value, default)
        assert wrong or type(taken) is type(default)


def test_every_setting_has_a_help_and_its_defaults_fit() -> None:
    from health.settings_merge import fit

    for table, keys in settings.TABLES.items():
        for key, setting in keys.items():
            assert setting.help, f"{table}.{key}"
            assert fit(setting.default, setting.default)[1] == ""
