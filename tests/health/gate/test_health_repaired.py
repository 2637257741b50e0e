"""robust-health repaired: a person's word, in the node's history and in the ledger."""

from __future__ import annotations

import json
from pathlib import Path

import health_site
import pytest
from health_site import GPU, gpus

from health import cli
from health.history import events
from robust_slurm.slurm import SlurmNode

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


class Answers:
    """Slurm with one node, or with none."""

    def __init__(self, *nodes: SlurmNode) -> None:
        self._nodes = {node.name: node for node in nodes}

    def nodes(self, names: list[str]) -> dict[str, SlurmNode]:
        return self._nodes


def one(*state: str, reason: str | None = None) -> SlurmNode:
    flags = frozenset(state)
    return SlurmNode("n1", "n1", None, flags, reason, None, (), None, 1, None, {})


@pytest.mark.parametrize(
    ("slurm", "said", "drained"),
    [
        (Answers(one("IDLE")), "the node is not drained, so there is nothing to undrain", False),
        (
            Answers(one("IDLE", "DRAIN", reason="robust:node:disk-full:/:reboot:job0")),
            "the next sweep checks the node and undrains it",
            True,
        ),
        (
            Answers(one("IDLE", "DRAIN", reason="fan")),
            "the node stays drained: another than robust-slurm did it (fan)",
            True,
        ),
    ],
)
def test_what_follows_a_repair_is_what_slurm_has(
    slurm: Answers,
    said: str,
    drained: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command said "the next sweep undrains it" of nodes that were not drained."""
    monkeypatch.setattr("health.gate.act.open_door", lambda settings: lambda deadline: slurm)
    assert cli.main(["repaired", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert said in shown["text"] and shown["drained"] is drained


def test_a_node_that_slurm_does_not_have_is_bad_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("health.gate.act.open_door", lambda settings: lambda deadline: Answers())
    assert cli.main(["repaired"]) == 2
    assert "Slurm has no node n1; name this node" in capsys.readouterr().err
    assert not events.load(str(tmp_path / "spool"))


def test_what_cannot_be_recorded_is_1(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.write_text(f'[gate]\nspool = "{site}/none"\n')
    assert cli.main(["repaired"]) == 1
    assert "not fully recorded" in capsys.readouterr().err
