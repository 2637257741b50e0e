"""Laws of every GPU family: healthy boards are silent, and what did not answer is told once."""

from __future__ import annotations

import pytest
from fake_gpus import MODELS, gpu_node, h100, snapshot
from fake_system import FakeSystem
from gpu_families import FAMILIES, check


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
