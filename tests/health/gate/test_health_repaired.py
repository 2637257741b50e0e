"""robust-health repaired: a person's word, in the node's history and in the ledger."""

from __future__ import annotations

from pathlib import Path

import health_site
import pytest
from health_site import GPU, gpus

from health import cli
from health.history import events

site = health_site.site


def test_a_person_says_that_the_node_was_repaired(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["repaired", "--note", "new DIMM"]) == 0
    assert "repair recorded" in capsys.readouterr().out
    (event,) = events.load(str(tmp_path / "spool"))
    assert event.kind == "repaired" and event.data["note"] == "new DIMM"
    assert (tmp_path / "state/nodes/n1.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("gpu", "pci"),
    [
        ("gpu3", "0000:3b:00.0"),
        ("3", "0000:3b:00.0"),
        ("0000:3B:00.0", "0000:3b:00.0"),
        ("all", ""),
    ],
)
def test_a_person_says_that_a_gpu_was_reset(
    gpu: str, pci: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus(monkeypatch, GPU)
    assert cli.main(["repaired", "--reset", gpu]) == 0
    (event,) = events.load(str(tmp_path / "spool"))
    assert event.kind == "reset" and event.data["gpu"] == pci


def test_what_cannot_be_recorded_is_1(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write_text(f'[gate]\nspool = "{site}/none"\n')
    assert cli.main(["repaired"]) == 1
    assert "not fully recorded" in capsys.readouterr().err
