"""Settings: where they come from, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.config import FIELDS, Config, ConfigError, flag, flags, help_text, load


def get(
    tmp_path: Path,
    cli: dict[str, str | None] | None = None,
    env: dict[str, str] | None = None,
    file: str | None = None,
    site: str | None = None,
) -> Config:
    if file is not None:
        (tmp_path / "robust.toml").write_text(file)
    site_file = tmp_path / "site.toml"
    if site is not None:
        site_file.write_text(site)
    return load(cli or {}, env or {}, tmp_path, site_file)


def test_defaults(tmp_path: Path) -> None:
    config = get(tmp_path)
    assert config.spares == 0 and config.hang and config.requeue == "auto"
    assert config.state_dir == Path.home() / ".robust-slurm"


def test_precedence(tmp_path: Path) -> None:
    site, file = (
        "spares = 1\nmax_restarts = 11\ndrain = 'direct'\n",
        "spares = 2\nmax_restarts = 12\n",
    )
    env = {"ROBUST_SPARES": "3"}
    assert get(tmp_path, site=site).spares == 1
    assert get(tmp_path, site=site, file=file).spares == 2
    assert get(tmp_path, site=site, file=file, env=env).spares == 3
    config = get(tmp_path, {"robust-spares": "4"}, env, file, site)
    assert (config.spares, config.max_restarts, config.drain) == (4, 12, "direct")


@pytest.mark.parametrize(
    ("cli", "name", "value"),
    [
        ({"robust-no-hang": None}, "hang", False),
        ({"robust-verbose": None}, "verbose", True),
        ({"robust-no-auto": None}, "auto", False),
        ({"robust-no-rank-env": None}, "rank_env", False),
        ({"robust-stop-grace": "2.5"}, "stop_grace", 2.5),
        ({"robust-standby-partition": ""}, "standby_partition", ""),
        ({"robust-state-dir": "/s"}, "state_dir", Path("/s")),
    ],
)
def test_command_line(tmp_path: Path, cli: dict[str, str | None], name: str, value: object) -> None:
    assert getattr(get(tmp_path, cli), name) == value


@pytest.mark.parametrize(
    ("word", "value"),
    [("1", True), ("TRUE", True), ("on", True), ("0", False), ("No", False), ("off", False)],
)
def test_booleans_in_the_environment(tmp_path: Path, word: str, value: bool) -> None:
    assert get(tmp_path, env={"ROBUST_HANG": word}).hang is value


def test_an_empty_variable_is_none(tmp_path: Path) -> None:
    assert get(tmp_path, env={"ROBUST_SPARES": ""}).spares == 0


def test_a_newer_site_file_does_not_stop_jobs_of_an_older_release(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.write_text("spars = 1\nmax_restarts = 7\n")
    said: list[str] = []
    found = load({}, {"ROBUST_HAN": "0"}, tmp_path, site, warn=said.append)
    assert found.max_restarts == 7 and found.spares == 0
    assert "unknown setting 'spars'; did you mean spares?" in said[0] and "ROBUST_HAN" in said[1]
    with pytest.raises(ConfigError, match="unknown setting 'spars'"):
        load({}, {}, tmp_path, site, strict=True)
    (tmp_path / "robust.toml").write_text("spars = 1\n")
    with pytest.raises(ConfigError, match="unknown setting 'spars'"):
        load({}, {}, tmp_path, tmp_path / "none")


@pytest.mark.parametrize(
    ("cli", "env", "file", "says"),
    [
        ({"robust-spares": "two"}, {}, None, "--robust-spares: spares = 'two'"),
        ({"robust-spares": "-1"}, {}, None, "must be at least 0"),
        ({"robust-spares": "1.5"}, {}, None, "--robust-spares"),
        ({"robust-stop-grace": "nan"}, {}, None, "must be at least"),
        ({"robust-stop-grace": "inf"}, {}, None, "must be at least"),
        ({"robust-hang-floor": "0"}, {}, None, "must be at least 0.1"),
        ({"robust-requeue": "maybe"}, {}, None, "use one of auto, never"),
        ({}, {"ROBUST_HANG": "maybe"}, None, "environment ROBUST_HANG: hang = 'maybe': use true"),
        ({"robust-log-level": "chatty"}, {}, None, "use one of debug, info, warning, error"),
        ({"robust-stop-margin": "10"}, {}, None, "stop_margin = '10': must be at least 11"),
        (
            {"robust-outage-wait": "595"},
            {},
            None,
            "suspend_limit = 600 s must be longer than outage_wait + 5 s = 600 s: ",
        ),
        ({}, {}, "suspend_limit = 15", "raise suspend_limit or lower outage_wait"),
        ({}, {}, "roster_interval = 60", "roster_interval = 60 s must be at most 10 s: "),
        ({"robust-interval": "5.1"}, {}, None, "raise hang_floor or lower interval"),
        ({}, {}, "spares = 'x'", "robust.toml: spares = 'x'"),
        ({}, {}, "spares = true", "not a int"),
        ({}, {}, "requeue = 3", "not a string"),
        ({}, {}, "spare = 1", "unknown setting 'spare'; did you mean spares?"),
        ({}, {}, "zzz = 1", "unknown setting 'zzz'"),
        ({}, {}, "spares = ", "cannot be read"),
        ({"robust-config": "/nowhere/x.toml"}, {}, None, "/nowhere/x.toml: cannot be read"),
        ({}, {"ROBUST_CONFIG": "/nowhere/x.toml"}, None, "/nowhere/x.toml: cannot be read"),
        ({"robust-state-dir": "~nobody-at-all/x"}, {}, None, "state_dir = '~nobody-at-all/x'"),
    ],
)
def test_bad_values_name_their_source(
    tmp_path: Path, cli: dict[str, str | None], env: dict[str, str], file: str | None, says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        get(tmp_path, cli, env, file)
    assert says in str(caught.value)


def test_settings_at_their_bounds_are_in_order(tmp_path: Path) -> None:
    cli = {"robust-outage-wait": "594", "robust-roster-interval": "10", "robust-interval": "5"}
    assert get(tmp_path, cli).outage_wait == 594.0
    assert get(tmp_path, {"robust-interval": "60", "robust-no-hang": None}).interval == 60.0


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "robust.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        get(tmp_path)


def test_other_rooms_tables_are_left_alone(tmp_path: Path) -> None:
    assert get(tmp_path, file="spares = 1\n[health]\nanything = 'goes'\n").spares == 1


def test_a_named_file_replaces_the_local_one(tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("spares = 5")
    assert get(tmp_path, {"robust-config": str(other)}, file="max_restarts = 9").spares == 5
    assert get(tmp_path, {"robust-config": str(other)}).max_restarts == Config().max_restarts
    assert get(tmp_path, {}, {"ROBUST_CONFIG": str(other)}).spares == 5


def test_the_state_dir_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks may run in another directory than robust-srun."""
    monkeypatch.chdir(tmp_path)
    assert get(tmp_path, {"robust-state-dir": "state"}).state_dir == tmp_path / "state"
    monkeypatch.setenv("HOME", "/h")
    assert get(tmp_path, {"robust-state-dir": "~/s"}).state_dir == Path("/h/s")


def test_a_site_directory_that_may_not_be_searched(tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300) / "robust.toml"  # stat fails, and not with "no such file"
    assert load({}, {}, tmp_path, too_long).spares == 0


def test_flags_and_help_name_every_setting() -> None:
    known, text = flags(), help_text()
    for name, f in FIELDS.items():
        assert flag(name)[2:] in known
        is_switch = f.type == "bool"
        assert known[flag(name)[2:]] is not is_switch
        shown = flag("no_" + name if f.default is True else name)
        assert f"  {shown}" in text
        said = str(f.metadata["off" if f.default is True else "help"])
        assert said and said in text
    assert text.count("[default: ") == len(FIELDS)
    assert known["robust-help"] is False and known["robust-config"] is True


@settings(deadline=None)
@given(
    st.sampled_from(sorted(FIELDS)), st.text(st.characters(exclude_characters="\0"), max_size=12)
)
def test_any_text_is_taken_or_refused(name: str, text: str) -> None:
    try:
        load({}, {"ROBUST_" + name.upper(): text}, Path("/nowhere"), Path("/nowhere/site"))
    except ConfigError as err:
        assert name in str(err)
