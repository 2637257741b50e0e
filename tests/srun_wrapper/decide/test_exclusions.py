"""Exclusion of bad nodes from a job's next request."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from robust_slurm.slurm import SlurmNode
from srun_wrapper.decide.exclusions import BadNode, Strength, able_nodes, exclusions, remembered

ONCE, TWICE, PROVEN = Strength
OLD, NEW = 100.0, 200.0


@pytest.mark.parametrize(
    ("bad", "able", "needed", "excluded"),
    [
        ([], "a b", 2, ""),
        ([BadNode("a")], "a b c", 2, "a"),
        ([BadNode("a")], "a b", 2, ""),
        ([BadNode("a")], "a", 2, ""),  # too few as it is
        ([BadNode("x"), BadNode("a")], "a b", 1, "x a"),  # x is down, or of another partition
        ([BadNode("x")], "a b", 2, "x"),
        ([BadNode("a", ONCE, OLD), BadNode("b", ONCE, NEW)], "a b c", 2, "b"),
        ([BadNode("a", ONCE, NEW), BadNode("b", TWICE, OLD)], "a b c", 2, "b"),
        (
            [BadNode("a", PROVEN, OLD), BadNode("b", TWICE, NEW), BadNode("c", ONCE, NEW)],
            "a b c d",
            3,
            "a",
        ),
        (
            [BadNode("a", PROVEN, OLD), BadNode("b", TWICE, NEW), BadNode("c", ONCE, NEW)],
            "a b c d",
            2,
            "a b",
        ),
        (
            [BadNode("a", PROVEN, OLD), BadNode("b", TWICE, NEW), BadNode("c", ONCE, NEW)],
            "a b c d",
            1,
            "a b c",
        ),
        # All but the batch host were lost in an outage that looked like many losses.
        ([BadNode(n, ONCE, NEW) for n in "bcdefgh"], "a b c d e f g h", 8, ""),
        ([BadNode(n, ONCE, NEW) for n in "bcdefgh"], "a b c d e f g h i", 8, "b"),
    ],
)
def test_enough_nodes_remain(bad: list[BadNode], able: str, needed: int, excluded: str) -> None:
    found, dropped = exclusions(bad, set(able.split()), needed)
    assert found == tuple(excluded.split())
    assert {*found, *dropped} == {one.node for one in bad} and not {*found} & {*dropped}
    left = set(able.split()).difference(found)
    assert len(left) >= min(needed, len(able.split()))


def node(name: str, usable: bool, partitions: str, features: str) -> SlurmNode:
    words = tuple(features.split(",")) if features else ()
    values: dict[str, Any] = {"name": name, "usable": usable, "features": words}
    return cast(SlurmNode, SimpleNamespace(**values, partitions=tuple(partitions.split())))


@pytest.mark.parametrize(
    ("features", "able"),
    [
        (None, {"n1", "n3", "s1"}),
        ("h100", {"n1", "s1"}),
        ("h100&ib", {"n1"}),
        ("[h100|a100]", {"n1", "n3", "s1"}),
        ("gone", set()),
    ],
)
def test_able_nodes(features: str | None, able: set[str]) -> None:
    nodes = [
        node("n1", True, "train", "h100,ib"),
        node("n2", False, "train", "h100,ib"),
        node("n3", True, "other train", "a100"),
        node("o1", True, "other", "h100,ib"),
        node("s1", True, "standby", "h100"),
    ]
    assert able_nodes(nodes, ["train", "standby"], features) == able


def test_what_the_jobs_reports_say(tmp_path: Path) -> None:
    directory = tmp_path / "accusations"
    directory.mkdir()
    for name, record in {
        "n2.0-1.json": {"time": OLD},
        "n2.0-2.json": {"time": NEW},
        "n2.0-3.json": {"time": NEW},
        "n2.0-3.withdrawn.json": {"time": NEW},  # there are other reports
        "n3.0-1.json": {"time": NEW, "proven": True},
        "n4.0-1.json": {"time": NEW},
        "n4.0-1.withdrawn.json": {"time": NEW},
        "gpu-5.site.org.0-1.json": "broken",
    }.items():
        (directory / name).write_text(json.dumps(record))
    found = {one.node: one for one in remembered(tmp_path)}
    assert found == {
        "n2": BadNode("n2", TWICE, NEW),
        "n3": BadNode("n3", PROVEN, NEW),
        "gpu-5.site.org": BadNode("gpu-5.site.org", ONCE, 0.0),
    }
    assert remembered(None) == remembered(tmp_path / "nowhere") == []
