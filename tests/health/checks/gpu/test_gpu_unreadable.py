"""Findings of the GPU families from a query that the driver refused."""

from __future__ import annotations

import pytest
from fake_gpus import gpu_node, h100
from gpu_families import FAMILIES, change, check, said

REFUSED = [
    ("gpu_recovery", "recovery_action", "recovery-unreadable", "ERROR"),
    ("gpu_ecc", "ecc", "ecc-unreadable", "ERROR"),
    ("gpu_ecc", "ecc.volatile_uncorrected", "ecc-unreadable", "ERROR"),
    ("gpu_memory", "remap", "remap-unreadable", "ERROR"),
    ("gpu_memory", "retired.pending", "remap-unreadable", "ERROR"),
    ("gpu_clocks", "throttle", "clocks-unreadable", "WARN"),
    ("gpu_thermal", "temperature.gpu", "temperature-unreadable", "WARN"),
    ("gpu_thermal", "power.draw", "power-unreadable", "WARN"),
    ("gpu_pcie", "pcie", "pcie-unreadable", "ERROR"),
    ("nvlink", "nvlinks.3", "nvlink-unreadable", "ERROR"),
    ("nvlink", "fabric", "nvlink-unreadable", "ERROR"),
    ("gpu_modes", "persistence", "modes-unreadable", "WARN"),
    ("gpu_leftovers", "processes", "gpu-use-unreadable", "ERROR"),
]


@pytest.mark.parametrize(("family", "query", "condition", "status"), REFUSED)
@pytest.mark.parametrize("error", ["NVML_ERROR_UNKNOWN", "NVML_ERROR_TIMEOUT"])
def test_a_failed_query_is_said_by_its_family_only(
    family: str, query: str, condition: str, status: str, error: str
) -> None:
    devices = [h100(0), h100(1)]
    devices[1]["errors"][query] = error
    system = gpu_node(devices)
    for name in FAMILIES:
        found = check(name).run(system)
        if name == family:
            assert [(f.check, f.status, f.device) for f in found] == [(condition, status, "gpu1")]
            assert error in found[0].evidence and query in found[0].evidence
        else:
            assert found == []


@pytest.mark.parametrize("query", [row[1] for row in REFUSED])
@pytest.mark.parametrize(
    "error", ["NOT_SUPPORTED", "INVALID_ARGUMENT", "FUNCTION_NOT_FOUND", "NO_DATA"]
)
def test_a_query_that_does_not_exist_is_no_finding(query: str, error: str) -> None:
    device = change(h100(0), errors={query: f"NVML_ERROR_{error}"})
    system = gpu_node([device])
    assert [f for family in FAMILIES for f in check(family).run(system)] == []


@pytest.mark.parametrize(
    ("error", "condition", "status", "action"),
    [
        ("GPU_IS_LOST", "gpu-gone", "FAIL", "reboot"),
        ("RESET_REQUIRED", "gpu-reset-required", "FAIL", "reset-gpu"),
        ("INSUFFICIENT_POWER", "gpu-power-cable", "FAIL", "service"),
        ("IRQ_ISSUE", "gpu-gone", "FAIL", "reboot"),
        ("CORRUPTED_INFOROM", "inforom-corrupt", "WARN", "service"),
    ],
)
def test_an_error_of_the_whole_device_is_said_once(
    error: str, condition: str, status: str, action: str
) -> None:
    errors = dict.fromkeys(("ecc", "remap", "clocks", "nvlinks"), f"NVML_ERROR_{error}")
    system = gpu_node([change(h100(0), errors=errors)])
    found = [f for family in FAMILIES for f in check(family).run(system)]
    assert said(found) == [(condition, status, "gpu0", action)]
