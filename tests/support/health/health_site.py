"""A node for tests of robust-health: settings, spool and ledger of its own, chosen GPUs, checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from health import cli, commands
from health.check import Check
from health.children.child import write_all
from health.finding import Finding
from health.nvidia import nvml
from health.settings_file import END

GPU = {
    "index": 3,
    "pci": "0000:3b:00.0",
    "name": "NVIDIA H100 80GB HBM3",
    "vbios": "96.00",
    "clocks": {"max_sm": 1980, "max_memory": 2619},
    "power": {"limit": 700.0, "enforced_limit": 700.0},
    "pcie": {"generation": 1, "max_generation": 5, "width": 8, "max_width": 16},
    "nvlinks": [{"link": 0, "active": True}, {"link": 1, "active": False}],
    "errors": {},
}


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Settings of a site, a spool and a state directory of this test's own; no GPU driver."""
    for name in ("spool", "state/nodes"):
        (tmp_path / name).mkdir(parents=True)
    path = tmp_path / "robust.toml"
    path.write_text(f'state_dir = "{tmp_path}/state"\n[gate]\nspool = "{tmp_path}/spool"\n{END}\n')
    monkeypatch.setenv("ROBUST_SITE_CONFIG", str(path))
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return path


def gpus(monkeypatch: pytest.MonkeyPatch, *devices: dict[str, Any]) -> None:
    def collect(fd: int, needed: object) -> None:
        for line in (
            ["top", {"driver": "570.1", "count": len(devices)}],
            *(["device", device] for device in devices),
            ["stage", "done"],
        ):
            write_all(fd, json.dumps(line).encode() + b"\n")

    monkeypatch.setattr(nvml, "_collect", collect)


def finds(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    mine = Check("disk", lambda system: list(findings), (), {})
    monkeypatch.setattr(commands, "ALL", (mine,))


@pytest.fixture
def recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Path:
    """A tree of a healthy node."""
    gpus(monkeypatch, GPU)
    finds(monkeypatch)
    assert cli.main(["record", str(tmp_path / "tree")]) == 0
    capsys.readouterr()
    return tmp_path / "tree"
