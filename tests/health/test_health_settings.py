"""robust.toml as the gate reads it: defaults, nodes, bad keys, files that must not be used."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import broken_settings
import pytest
from hypothesis import given
from hypothesis import strategies as st

from health import settings
from health.settings import Settings
from health.settings_file import END


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def loaded(text: str, node: str = "gpu3") -> Settings:
        path = tmp_path / "robust.toml"
        path.write_text(f"{text}\n{END}\n")
        path.chmod(0o644)
        return settings.load(str(path), node, broken_settings.CHECKS)

    return loaded


def test_a_site_that_says_nothing_has_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SITE_FILE", str(tmp_path / "absent.toml"))
    found = settings.load(None, "n1", broken_settings.CHECKS)
    assert found == settings.defaults(broken_settings.CHECKS)
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
        ('[nodes."gpu[1-".gate]\nenabled = false', "is not a list of hosts"),
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
    assert found._replace(problems=()) == settings.defaults(broken_settings.CHECKS)


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
    found = settings.defaults(broken_settings.CHECKS)
    assert [found.deadline(w) for w in ("prolog", "epilog", "sweep", "deep")] == [8, 30, 50, 50]


def _in_open_directory(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        *broken_settings.UNSAFE,
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
    found = settings.load(str(path), "n1", broken_settings.CHECKS)
    assert found.gate["enabled"] is True
    assert len(found.problems) == 1 and said in found.problems[0]


@pytest.mark.slow
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
