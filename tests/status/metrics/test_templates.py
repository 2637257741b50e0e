"""The dashboard and the alert rules name metrics and labels that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from places import REPOSITORY
from status_records import NOW

from status.metrics.textfile import collect
from status.source import demo

yaml: Any = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def known() -> dict[str, tuple[str, ...]]:
    with demo(NOW) as source:
        return {family.name: family.labels for family in collect(source)[0]}


def expressions() -> list[tuple[str, str]]:
    """Each expression, and the texts in which its labels are used."""
    templates = REPOSITORY / "templates"
    board = json.loads((templates / "robust-grafana.json").read_text())
    found = [(t["expr"], t["legendFormat"]) for p in board["panels"] for t in p["targets"]]
    rules = yaml.safe_load((templates / "robust-alerts.yml").read_text())["groups"][0]["rules"]
    return [*found, *((r["expr"], json.dumps(r["annotations"])) for r in rules)]


def test_every_metric_and_label_is_there(known: dict[str, tuple[str, ...]]) -> None:
    assert len(expressions()) > 15
    for expr, text in expressions():
        names = re.findall(r"\brobust_slurm_\w+", expr)
        assert names and set(names) <= known.keys(), expr
        labels = {label for name in names for label in known[name]}
        by = re.findall(r"by \(([^)]*)\)", expr)
        used = {w for group in by for w in group.replace(" ", "").split(",")}
        used |= set(re.findall(r"\{\{ ?(?:\$labels\.)?(\w+) ?\}\}", text)) - {"value"}
        used |= set(re.findall(r"[{,](\w+)=", expr))
        assert used <= labels, expr


def test_the_page_names_every_metric(known: dict[str, tuple[str, ...]]) -> None:
    text = (REPOSITORY / "docs" / "monitoring.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(robust_slurm_\w+)`", text)) == known.keys()
