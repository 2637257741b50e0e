"""Laws of every GPU family: healthy boards are silent, tables and pages are whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_gpus import MODELS, gpu_node, h100, snapshot
from fake_system import FakeSystem
from gpu_families import FAMILIES, check

import health
from health.finding import ACTIONS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_healthy_node_is_silent(family: str, model: str, count: int) -> None:
    system = gpu_node([MODELS[model](i) for i in range(count)])
    assert check(family).run(system) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_board_that_answers_almost_nothing_is_silent(family: str) -> None:
    """Missing values are no finding where NVML does not support the query."""
    keys = ("pci", "index", "name", "uuid")
    bare = [{key: value for key, value in h100(i).items() if key in keys} for i in range(2)]
    for device in bare:
        rest = set(h100(0)) - set(device)
        device["errors"] = dict.fromkeys(rest, "NVML_ERROR_NOT_SUPPORTED")
    assert check(family).run(gpu_node(bare)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_node_passes_without_nvml(family: str) -> None:
    system = FakeSystem(
        {
            "/etc/slurm/slurm.conf": "NodeName=n1",
            "/sys/bus/pci/devices/0000:00:1f.0/vendor": "0x8086\n",
        }
    )
    assert check(family).run(system) == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("devices", [0, 2])
def test_what_did_not_answer_is_told_once(family: str, killed: bool, devices: int) -> None:
    """The driver is slow or hangs: all that it did not come to tell is unknown, not broken."""
    stage = f"gpu{devices} ecc" if devices else "init"
    over = {"hung": True, "killed": killed, "stage": stage, "count": 4 if devices else 0}
    gpus = [h100(i) for i in range(4)]
    system = gpu_node(gpus, snapshot=snapshot(gpus[:devices], **over))
    found = [finding.check for finding in check(family).run(system)]
    assert found == (["nvml-slow" if killed else "nvml-hung"] if family == "nvml" else [])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_table_is_whole(family: str) -> None:
    table = check(family)
    assert table.name == family
    ids = [condition.check for condition in table.conditions]
    assert len(set(ids)) == len(ids)
    assert all(condition.action in ACTIONS and condition.when for condition in table.conditions)
    assert all(setting.help for setting in table.settings.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_agrees_with_the_table(family: str) -> None:
    table = check(family)
    page = (Path(health.__file__).parent / "pages" / f"{family}.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split(" | ") for line in page.splitlines() if line.startswith("| `")]
    conditions = [(c.check, c.status, c.cls, c.action, c.when) for c in table.conditions]
    settings = [(key, setting.default) for key, setting in table.settings.items()]
    cells = [(row[0].strip().strip("`"), *(cell.strip() for cell in row[1:])) for row in rows]
    assert [row for row in cells if len(row) == 5] == conditions
    assert [(row[0], json.loads(row[1])) for row in cells if len(row) == 3] == settings
    assert page.startswith(f"# {family}: ")


def test_ids_are_unique_over_the_families() -> None:
    ids = [condition.check for family in FAMILIES for condition in check(family).conditions]
    assert len(set(ids)) == len(ids)
