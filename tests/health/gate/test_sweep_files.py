"""The sweep's files: the shared ledger, the fleet's values, the last usable settings."""

from __future__ import annotations

import json

import pytest
import sweep_site
from gate_site import GateSite, finding

from health.gate.fleet_file import copy_fleet
from health.sweep import main

pytestmark = pytest.mark.slow

site = sweep_site.site


def test_what_could_not_be_shared_is_brought_there(site: GateSite) -> None:
    (site.state / "nodes").rename(site.state / "away")
    site.find(finding("WARN", "none"))
    main([])
    (site.state / "away").rename(site.state / "nodes")
    main([])
    assert len(site.shared("boot")) == 1 and len(site.shared("run")) == 2


def test_the_fleets_values_come_to_the_node(site: GateSite) -> None:
    main([])
    shared = site.state / "nodes" / "fleet.json"
    shared.write_text(json.dumps({"driver": ["570.133.20"]}))
    main([])
    assert json.loads((site.spool / "fleet.json").read_text()) == {"driver": ["570.133.20"]}
    assert copy_fleet(str(site.state), str(site.spool)) is False


@pytest.mark.parametrize("what", ["junk", "list", "writable", "link"])
def test_fleet_values_that_cannot_be_trusted(
    site: GateSite, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    main([])
    shared = site.state / "nodes" / "fleet.json"
    shared.write_text("{" if what == "junk" else "[]" if what == "list" else "{}")
    if what == "writable":
        shared.chmod(0o666)
    if what == "link":
        shared.rename(site.state / "elsewhere")
        shared.symlink_to(site.state / "elsewhere")
    assert main([]) == 0
    assert not (site.spool / "fleet.json").exists()
    assert str(site.state) in capfd.readouterr().err


def test_no_state_directory(site: GateSite) -> None:
    site.settings(state=False)
    site.find(finding(action="none"))
    main([])
    site.find()
    main([])
    assert site.slurm.drained == []
    assert site.shared() == [] and len(site.events("drain", "undrain")) == 2


def test_a_history_that_cannot_be_read(site: GateSite, capfd: pytest.CaptureFixture[str]) -> None:
    main([])
    (site.spool / "history.jsonl").chmod(0o666)
    site.find(finding(action="none"))
    assert main([]) == 0
    assert site.slurm.drained == ["n1"]
    assert "can be written by others" in capfd.readouterr().err


@pytest.mark.parametrize("enabled", ["true", "false"])
def test_the_last_usable_settings_are_kept(
    site: GateSite, enabled: str, capfd: pytest.CaptureFixture[str]
) -> None:
    site.settings(gate=f"enabled = {enabled}")
    main([])
    last = site.toml.with_name("robust.toml.last")
    good = site.toml.read_bytes()
    assert last.read_bytes() == good and last.stat().st_mode & 0o777 == 0o644
    site.toml.write_text("[gate\n")
    main([])
    assert last.read_bytes() == good
    assert capfd.readouterr().err == ""


def test_a_lost_file_leaves_the_last_one_in_force(
    site: GateSite, capfd: pytest.CaptureFixture[str]
) -> None:
    """A dry run of a site whose robust.toml is gone stays one, sweep after sweep."""
    site.settings(gate="dry_run = true")
    main([])
    site.toml.unlink()
    site.find(finding())
    for _ in range(2):
        assert main([]) == 0
        assert site.slurm.drained == [] and "dry run: would drain n1" in capfd.readouterr().err
    assert site.toml.with_name("robust.toml.last").exists()
    assert site.events("run")[-1].data["dry_run"] is True
    checks = [one["check"] for one in site.events("run")[-1].data["findings"]]
    assert "config-unusable" in checks


def test_what_was_switched_off_stays_off_when_the_file_breaks(site: GateSite) -> None:
    site.settings(gate="enabled = false")
    main([])
    site.toml.write_text(site.toml.read_text() + "[gate]\n")  # twice the same table
    site.find(finding())
    assert main([]) == 0
    assert site.slurm.calls == []
