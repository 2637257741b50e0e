"""robust-health baseline: the fleet's values, as this node shows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import health_site
import pytest
from fake_host import CHECKS, healthy, ids, interface, port
from health_site import GPU, gpus

from health import baseline, cli

site = health_site.site


def test_the_baseline_is_this_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(
        monkeypatch,
        GPU,
        {
            **GPU,
            "index": 4,
            "nvlinks": [],
            "pcie": {"max_generation": 4, "width": 4},
            "power": {"limit": 700.0, "enforced_limit": 499.9},
        },
    )
    assert cli.main(["baseline"]) == 0
    model = GPU["name"]
    expected = {
        "driver": ["570.1"],
        "vbios": {model: ["96.00"]},
        "max_clocks": {model: {"sm": 1980, "memory": 2619}},
        "power_limits": {model: 700},
        "pcie": {model: {"generation": 5, "width": 8}},  # in use, of the best of them
        "nvlinks": {model: 1},
    }
    for place in ("spool", "state/nodes"):
        assert json.loads((tmp_path / place / "fleet.json").read_text()) == expected
    gpus(monkeypatch, {**GPU, "vbios": "97.00"})
    assert cli.main(["baseline", "--add", "--host"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    assert found["vbios"] == {model: ["96.00", "97.00"]} and found["driver"] == ["570.1"]
    assert found["memory"] > 0 and found["nvme"] >= 0
    assert isinstance(found["infiniband"], dict) and isinstance(found["ethernet"], dict)
    assert cli.main(["baseline"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    assert found["vbios"] == {model: ["97.00"]}


def test_a_host_is_recorded_as_the_checks_read_it() -> None:
    """The node that the host's facts were recorded from passes them."""
    down = port("mlx5_8", "1: DOWN") | port("mlx5_9", "2: INIT", physical="5: LinkUp")
    node = healthy(more=down | {"/sys/module/nvidia_peermem/refcnt": "8"})
    found = baseline.observe(node, True)
    assert found["memory"] == 2113560000 and found["nvme"] == 1
    assert found["infiniband"] == {
        f"mlx5_{i}": {"rate": 400.0, "firmware": ["28.39.1002"]} for i in range(8)
    }
    assert found["ethernet"] == {"bond0": 200000}  # of the default route
    assert found["services"] == [] and found["modules"] == ["nvidia_peermem"]
    again = healthy(more=down | {"/sys/module/nvidia_peermem/refcnt": "8"}, fleet=found)
    for check in CHECKS:
        assert check.run(again) == [], check.name
    slower = healthy(
        more=interface("bond0", speed="100000", bonding__slaves="eth0 eth1\n")
        | port("mlx5_3", rate="200 Gb/sec (4X HDR)")
        | port("mlx5_4", "1: DOWN"),
        fleet=found,
    )
    assert ids([f for check in CHECKS for f in check.run(slower)]) == [
        ("FAIL", "ethernet-slow", "bond0"),
        ("FAIL", "ib-rate", "mlx5_3"),
        ("FAIL", "ib-down", "mlx5_4"),
    ]


def test_disks_over_a_network_are_not_the_fleets() -> None:
    """A node that has not attached them, or fewer of them, lacks no hardware."""
    far = {f"/sys/class/nvme/nvme{n}/transport": way for n, way in ((1, "tcp"), (2, "rdma"))}
    found = baseline.observe(healthy(more=far), True)
    assert found["nvme"] == found["nvme_local"] == 1
    assert [f for check in CHECKS for f in check.run(healthy(fleet=found))] == []


def test_without_gpus_only_the_host_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus(monkeypatch)
    assert cli.main(["baseline"]) == 2
    assert "--host records the rest of the node" in capsys.readouterr().err
    assert cli.main(["baseline", "--host"]) == 0
    found = json.loads((tmp_path / "spool/fleet.json").read_text())
    host = {"memory", "nvme", "nvme_local", "infiniband", "ethernet", "services", "modules"}
    host |= {"topology"}
    assert set(found) == host


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda spool: (spool / "fleet.json").write_text("{"), "fleet.json: "),
        (lambda spool: (spool / "fleet.json").write_text("[]"), "is not a JSON object"),
        (lambda spool: spool.chmod(0o777), "can be written by others"),
    ],
)
def test_a_baseline_that_cannot_be_written_is_1(
    spoil: Any, said: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    site.write_text(f'[gate]\nspool = "{tmp_path}/spool"\n')
    gpus(monkeypatch, GPU)
    spoil(tmp_path / "spool")
    assert cli.main(["baseline"]) == 1
    err = capsys.readouterr().err
    assert said in err and "not recorded" in err and "Traceback" not in err


def test_a_state_directory_that_is_not_mounted_is_not_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state/nodes").rmdir()
    gpus(monkeypatch, GPU)
    assert cli.main(["baseline"]) == 2
    assert "state/nodes" in capsys.readouterr().err
    assert not (tmp_path / "state/nodes").exists()


@pytest.mark.parametrize(
    ("known", "found", "add", "merged"),
    [
        ({}, {"a": [1]}, False, {"a": [1]}),
        ({"a": [1]}, {"a": [2]}, False, {"a": [2]}),
        ({"a": [1]}, {"a": [2, 1]}, True, {"a": [1, 2]}),
        ({"a": {"m": [1], "n": [1]}}, {"a": {"m": [2]}}, False, {"a": {"m": [2], "n": [1]}}),
        ({"a": 3, "b": 4}, {"a": 5}, True, {"a": 5, "b": 4}),
        ({"a": "odd"}, {"a": {"m": 1}}, False, {"a": {"m": 1}}),
        (
            {"topology": {"a": {"x": 1}, "b": {}}},
            {"topology": {"a": {"y": 1}}},
            True,
            {"topology": {"a": {"y": 1}, "b": {}}},
        ),
        ({"ethernet": {"a": 1}}, {"ethernet": {"b": 2}}, False, {"ethernet": {"b": 2}}),
        ({"ethernet": {"a": 1}}, {"ethernet": {"b": 2}}, True, {"ethernet": {"a": 1, "b": 2}}),
    ],
)
def test_merging(
    known: dict[str, Any], found: dict[str, Any], add: bool, merged: dict[str, Any]
) -> None:
    assert baseline.merge(known, found, add) == merged
