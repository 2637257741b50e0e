"""robust-standby apply and show where they cannot: settings, input, Slurm, files."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
from standby_site import Site

from robust_slurm.config import ConfigError
from robust_slurm.slurm import Slurm, SlurmError
from standby.pool import cli, settings
from standby.pool import file as pool_file
from standby.pool.settings import pool_settings
from status.cli import main as robust_status


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_root_follows_the_sites_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Site(tmp_path)  # directories that root may trust
    own, file = tmp_path / "robust.toml", tmp_path / "site.toml"
    own.write_text('state_dir = "/users"\nstandby_partition = "theirs"\n')
    file.write_text('state_dir = "/shared/"\nstandby_partition = "spare"\n')
    monkeypatch.chdir(tmp_path)
    environ = {"ROBUST_STATE_DIR": "/tmp/x", "ROBUST_CONFIG": str(own)}
    named = {**environ, "ROBUST_SITE_CONFIG": str(file)}
    assert pool_settings(None, named, 0) == ("/shared", "spare")
    assert pool_settings("rel", named, 0) == (str(tmp_path / "rel"), "spare")
    monkeypatch.setattr(settings, "SITE_FILE", str(tmp_path / "none.toml"))
    assert pool_settings(None, environ, 0) == ("", "standby")
    assert pool_settings(None, environ, 1000) == ("/tmp/x", "theirs")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ('state_dir = "/x"', 0o666),
        ('state_dir = "x"', 0o644),
        ("state_dir = 3", 0o644),
        ('state_dir = "~/x"', 0o644),
        ('standby_partition = "a b"', 0o644),
        ("[", 0o644),
        (None, 0),
    ],
)
def test_a_file_that_root_does_not_use(
    site: Site, text: str | None, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = site.state / "site.toml"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    monkeypatch.setenv("ROBUST_SITE_CONFIG", str(file))
    with pytest.raises(ConfigError, match=r"site\.toml"):
        pool_settings(None, os.environ, 0)


@pytest.mark.parametrize(
    "words",
    [
        "apply",
        "apply --yes",
        "apply --nodes s[1-",
        "apply --nodes s[1-3] --size -1",
        "apply --nodes s[1-3] --size 1.5",
        "apply --nodes s[1-3] --partition a/b",
        "apply --nodes s[1-3] --partition p;q --yes",
        "apply --nodes s[1-3] --from standby --yes",
        "apply --nodes s[1-3] --from nowhere --yes",
        "apply --nodes s[1-3] --refill pool --yes",
        "apply --nodes s[1-3] --refill nope",
        "apply --nodes s[1-3] --proof-hours nan",
        "apply --nodes s[1-3] --qos high --yes",
        "apply --nodes s[1-3] --size 1",  # no terminal to ask on
        "apply --nodes s[1-3] --size 4 --yes",
        "apply --nodes s[1-99999999] --yes",
        "apply --nodes s[1-3] --yes --partition train",  # has other nodes, and is not ours
        "apply --nodes s[1-3] --yes --backfill train",
        "show --what",
        "",
    ],
)
def test_bad_input(site: Site, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    given_ = words.split()
    code = cli.main([*given_, "--state-dir", str(site.state)], site.slurm.door())
    assert code == 2 and site.slurm.orders == []
    assert capsys.readouterr().err


def test_a_strangers_partition_that_is_named_like_ours_keeps_its_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site = Site(tmp_path, **{"standby": "s[1-3]", "lease-held": "n[1-2],s1"})
    site.slurm.preempt()
    site.apply("--nodes", "s[1-3]", "--lease", "lease", code=2)
    assert site.slurm.orders == []
    assert "--lease lease-held: this partition exists" in capsys.readouterr().err
    site.apply("--nodes", "s[1-3]", "--lease", "warm")
    assert any("warm-held" in order for order in site.slurm.orders)


def test_a_qos_needs_a_slurmdbd(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.run("apply", "--yes", "--nodes", "s1", "--qos", "high")
    assert "needs slurmdbd" in capsys.readouterr().err
    site.slurm.config["AccountingStorageType"] = "accounting_storage/slurmdbd"
    site.apply("--nodes", "s[1-3]", "--qos", "high")
    assert site.slurm.orders == ["update standby QoS=high"]
    site.apply("--qos", "none")
    assert site.slurm.orders[1:] == ["update standby QoS="]


def test_the_qos_of_a_partition_of_ours(site: Site) -> None:
    site.slurm.config["AccountingStorageType"] = "accounting_storage/slurmdbd"
    site.apply("--nodes", "s[1-3]", "--partition", "own", "--qos", "high")
    site.apply("--qos", "none")
    assert site.slurm.orders[1:] == ["update own QoS="]
    text = site.apply("--qos", "low")
    assert "PartitionName=own Nodes=s[1-3] QoS=low" in text
    assert site.slurm.orders[2:] == ["update own QoS=low"]


@pytest.mark.parametrize("word", ["apply --yes --nodes s1", "show"])
def test_slurmctld_is_down(site: Site, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]")
    site.slurm.down = True
    assert site.run(*word.split())[0] == 1
    assert "no slurmctld answers" in capsys.readouterr().err


def test_without_the_right(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.slurm.denied = True
    words = ("--nodes", "s[1-3]", "--size", "1")
    site.apply(*words, code=1)
    assert "root or SlurmUser" in capsys.readouterr().err
    assert pool_file.load(str(site.state)) is None  # nothing was done, so nothing is recorded
    site.slurm.denied = False
    site.apply(*words)
    before = site.record
    site.slurm.denied = True
    site.apply("--size", "3", code=1)
    assert site.record == before  # nor is it wished


@pytest.mark.parametrize("said", ["Unable to contact slurm controller", "insane message length"])
def test_an_order_whose_answer_was_lost_is_recorded(site: Site, said: str) -> None:
    site.slurm.lost = f"slurm_create_partition error: {said}"
    site.apply("--partition", "other", "--nodes", "s[1-3]", code=1)
    assert site.record.done["other"].created and "other" in site.slurm.partitions


def test_without_slurms_commands(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    def none(argv: Any, *_: Any) -> Any:
        raise SlurmError("other", argv, "scontrol is not in PATH", "install them")

    words = ["apply", "--yes", "--nodes", "s[1-3]", "--state-dir", str(site.state)]
    assert cli.main(words, Slurm(none, environ={})) == 1
    said = capsys.readouterr().err
    assert "not in PATH" in said and "slurmctld answers" not in said


BROKEN = '{"wish": {"partition": "\xff", "nodes": [], "size": 0}}'


DEEP = '{"later": ' + "[" * 100_000


@pytest.mark.parametrize("content", ["{}", "[", '{"wish": 3}', '{"v": 2}', "\xff", BROKEN, DEEP])
def test_a_broken_record(site: Site, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]")
    (site.state / "standby" / "pool.json").write_text(content, encoding="latin-1")
    assert site.run("show")[0] == 1
    assert "pool.json" in capsys.readouterr().err
    out = io.StringIO()
    assert robust_status(["--state-dir", str(site.state)], site.slurm.door(), out) == 0
    assert "is not a record of a pool" in out.getvalue()


def test_one_at_a_time(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    with pool_file.locked(str(site.state)):
        assert site.run("apply", "--yes", "--nodes", "s[1-3]")[0] == 1
    assert "another robust-standby" in capsys.readouterr().err


def test_no_state_directory(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["apply", "--yes", "--nodes", "s1", "--state-dir", str(site.state / "not-mounted")]
    assert cli.main(words, site.slurm.door()) == 1
    assert "not-mounted" in capsys.readouterr().err and not (site.state / "not-mounted").exists()


def test_partitions_keep_their_names(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    site.apply("--nodes", "s[1-3]", "--size", "1")
    site.apply("--partition", "other", code=2)
    assert "apply --size 0" in capsys.readouterr().err
