"""One change of one healthy GPU, what its family says, and with which settings: a table."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fake_gpus import a100, gb200, gpu_node, h100, rtx4090, v100
from gpu_families import GONE, change, check

WORK = [{"pid": 4711, "memory": 1 << 30, "kind": "compute"}]
Row = tuple[str, Any, dict[str, Any], dict[str, Any], list[str]]
ROWS: list[Row] = [
    # gpu_recovery
    ("gpu_recovery", h100, {"recovery_action": 1}, {}, ["FAIL recovery-reset"]),
    ("gpu_recovery", h100, {"recovery_action": 2}, {}, ["FAIL recovery-reboot"]),
    ("gpu_recovery", h100, {"recovery_action": 3}, {}, ["FAIL recovery-drain-p2p"]),
    ("gpu_recovery", h100, {"recovery_action": 4}, {}, ["FAIL recovery-drain-reset"]),
    ("gpu_recovery", h100, {"recovery_action": 5}, {}, ["FAIL recovery-imex"]),
    ("gpu_recovery", h100, {"recovery_action": 6}, {}, ["FAIL recovery-bus-reset"]),
    ("gpu_recovery", h100, {"recovery_action": 7}, {}, ["FAIL recovery-reboot"]),
    ("gpu_recovery", h100, {"recovery_action": 99}, {}, ["FAIL recovery-unknown"]),
    # gpu_ecc: contained by A100 and later, if the driver does not ask for more
    ("gpu_ecc", h100, {"ecc__volatile_uncorrected": 1}, {}, ["WARN ecc-contained"]),
    ("gpu_ecc", h100, {"ecc__volatile_uncorrected": 3}, {}, ["WARN ecc-contained"]),
    ("gpu_ecc", h100, {"ecc__volatile_uncorrected": 4}, {}, ["FAIL ecc-uncorrected"]),
    (
        "gpu_ecc",
        h100,
        {"ecc__volatile_uncorrected": 1},
        {"contained": 0},
        ["FAIL ecc-uncorrected"],
    ),
    (
        "gpu_ecc",
        h100,
        {"ecc__volatile_uncorrected": 1, "recovery_action": 1},
        {},
        ["FAIL ecc-uncorrected"],
    ),
    ("gpu_ecc", a100, {"ecc__volatile_uncorrected": 1}, {}, ["WARN ecc-contained"]),
    (
        "gpu_ecc",
        a100,
        {"ecc__volatile_uncorrected": 1, "name": "NVIDIA A10"},
        {},
        ["FAIL ecc-uncorrected"],
    ),
    ("gpu_ecc", v100, {"ecc__volatile_uncorrected": 1}, {}, ["FAIL ecc-uncorrected"]),
    ("gpu_ecc", v100, {"ecc__volatile_uncorrected": 1}, {"uncorrected": 1}, []),
    ("gpu_ecc", h100, {"ecc__volatile_corrected": 200_000}, {}, []),  # 24 h: 8,333 an hour
    ("gpu_ecc", h100, {"ecc__volatile_corrected": 240_000}, {}, []),
    ("gpu_ecc", h100, {"ecc__volatile_corrected": 250_000}, {}, ["WARN ecc-corrected-rate"]),
    ("gpu_ecc", h100, {"ecc__aggregate_uncorrected": 100}, {}, []),
    ("gpu_ecc", h100, {"ecc__aggregate_uncorrected": 101}, {}, ["WARN ecc-lifetime"]),
    ("gpu_ecc", h100, {"ecc__aggregate_corrected": 10**9}, {}, []),
    ("gpu_ecc", h100, {"ecc__sram_threshold_exceeded": True}, {}, ["FAIL ecc-sram-threshold"]),
    # gpu_memory
    ("gpu_memory", h100, {"remap__failed": True}, {}, ["FAIL remap-failed"]),
    ("gpu_memory", h100, {"remap__pending": True}, {}, ["WARN remap-pending"]),
    (
        "gpu_memory",
        h100,
        {"remap__pending": True, "ecc__volatile_uncorrected": 1},
        {},
        ["WARN remap-pending"],
    ),
    (
        "gpu_memory",
        h100,
        {"remap__pending": True, "ecc__volatile_uncorrected": 1, "recovery_action": 4},
        {},
        ["FAIL remap-pending-unsafe"],
    ),
    (
        "gpu_memory",
        a100,
        {"remap__pending": True, "ecc__volatile_uncorrected": 1, "name": "NVIDIA A10"},
        {},
        ["FAIL remap-pending-unsafe"],
    ),
    (
        "gpu_memory",
        a100,
        {"remap__pending": True, "name": "NVIDIA A10"},
        {},
        ["WARN remap-pending"],
    ),
    (
        "gpu_memory",
        a100,
        {"remap__pending": True, "name": "NVIDIA A10", "ecc": GONE},
        {},
        ["FAIL remap-pending-unsafe"],
    ),
    ("gpu_memory", h100, {"remap__spare_none": 2}, {}, ["WARN remap-no-spare"]),
    ("gpu_memory", h100, {"remap__uncorrected": 8, "remap__corrected": 4}, {}, []),
    ("gpu_memory", h100, {"remap__uncorrected": 512}, {}, ["WARN remap-many"]),
    ("gpu_memory", h100, {"remap__uncorrected": 8}, {"remapped": 8}, ["WARN remap-many"]),
    ("gpu_memory", v100, {"retired__single": 40, "retired__double": 10}, {}, []),
    (
        "gpu_memory",
        v100,
        {"retired__single": 60, "retired__double": 3},
        {},
        ["FAIL pages-retired"],
    ),
    ("gpu_memory", v100, {"retired__double": 15}, {}, []),
    ("gpu_memory", v100, {"retired__double": 16}, {}, ["WARN pages-retired-double"]),
    ("gpu_memory", v100, {"retired__single": 5}, {"retired": 5}, ["FAIL pages-retired"]),
    ("gpu_memory", v100, {"retired__pending": True}, {}, ["WARN pages-pending"]),
    (
        "gpu_memory",
        v100,
        {"retired__pending": True, "ecc__volatile_uncorrected": 1},
        {},
        ["FAIL pages-pending-unsafe"],
    ),
    (
        "gpu_memory",
        v100,
        {"retired__pending": True, "ecc": GONE},
        {},
        ["FAIL pages-pending-unsafe"],
    ),
    # gpu_clocks: idle, power cap, application clocks, sync boost, display: ordinary
    *[("gpu_clocks", h100, {"throttle": bit}, {}, []) for bit in (0, 1, 2, 4, 0x10, 0x100, 0x107)],
    ("gpu_clocks", h100, {"throttle": 0x49}, {}, ["FAIL clocks-thermal"]),
    ("gpu_clocks", h100, {"throttle": 0x48, "processes": WORK}, {}, ["WARN clocks-thermal"]),
    ("gpu_clocks", h100, {"throttle": 0x48, "processes": GONE}, {}, ["WARN clocks-thermal"]),
    ("gpu_clocks", h100, {"throttle": 0x49, "processes": GONE}, {}, ["FAIL clocks-thermal"]),
    ("gpu_clocks", h100, {"throttle": 0x88}, {}, ["FAIL clocks-power-brake"]),
    ("gpu_clocks", h100, {"throttle": 0x80, "processes": WORK}, {}, ["WARN clocks-power-brake"]),
    (
        "gpu_clocks",
        h100,
        {"throttle": 0xC8},
        {},
        ["FAIL clocks-thermal", "FAIL clocks-power-brake"],
    ),
    ("gpu_clocks", h100, {"throttle": 0x09}, {}, ["WARN clocks-slowdown"]),
    ("gpu_clocks", h100, {"throttle": 0x21}, {}, ["WARN clocks-sw-thermal"]),
    ("gpu_clocks", h100, {"throttle": 0x20, "processes": WORK}, {}, []),
    ("gpu_clocks", h100, {"clocks__app_sm": 1200}, {}, ["WARN clocks-below-default"]),
    (
        "gpu_clocks",
        h100,
        {"clocks__app_sm": 1200},
        {"application_sm": 1980},
        ["FAIL clocks-application"],
    ),
    ("gpu_clocks", h100, {"clocks__app_sm": 1200}, {"application_sm": 1200}, []),
    ("gpu_clocks", h100, {"clocks__app_memory": 1000}, {}, ["WARN clocks-below-default"]),
    ("gpu_clocks", rtx4090, {"throttle": 1}, {}, []),
    ("gpu_clocks", gb200, {}, {"application_sm": 1980}, []),  # it has no application clocks
    # gpu_thermal: slowdown at 87, memory at 95
    ("gpu_thermal", h100, {"temperature__gpu": 81}, {}, []),
    ("gpu_thermal", h100, {"temperature__gpu": 82}, {}, ["FAIL temperature-gpu"]),
    (
        "gpu_thermal",
        h100,
        {"temperature__gpu": 82, "processes": WORK},
        {},
        ["WARN temperature-gpu"],
    ),
    ("gpu_thermal", h100, {"temperature__gpu": 82}, {"margin": 0}, []),
    ("gpu_thermal", h100, {"temperature__gpu": 60}, {"gpu_limit": 60}, ["FAIL temperature-gpu"]),
    ("gpu_thermal", h100, {"temperature__gpu": 99, "temperature__slowdown": GONE}, {}, []),
    ("gpu_thermal", h100, {"temperature__gpu": 40, "temperature__slowdown": -2}, {}, []),
    ("gpu_thermal", h100, {"temperature__memory": 95}, {}, []),
    ("gpu_thermal", h100, {"temperature__memory": 96}, {}, ["FAIL temperature-memory"]),
    # HBM of a board that reports no maximum for its memory has a limit of its own
    ("gpu_thermal", h100, {"temperature__memory": 95, "temperature__memory_max": GONE}, {}, []),
    (
        "gpu_thermal",
        h100,
        {"temperature__memory": 96, "temperature__memory_max": GONE},
        {},
        ["WARN temperature-hbm"],
    ),
    (
        "gpu_thermal",
        h100,
        {"temperature__memory": 96, "temperature__memory_max": 0},  # a T.Limit
        {},
        ["WARN temperature-hbm"],
    ),
    (
        "gpu_thermal",
        h100,
        {"temperature__memory": 96, "temperature__memory_max": GONE},
        {"memory_limit": 90},
        ["FAIL temperature-memory"],
    ),
    (
        "gpu_thermal",
        h100,
        {"temperature__memory": 96, "temperature__memory_max": GONE},
        {"hbm_limit": 0},
        [],
    ),
    (
        "gpu_thermal",
        h100,  # GDDR may be hotter
        {"name": "NVIDIA L40S", "temperature__memory": 100, "temperature__memory_max": GONE},
        {},
        [],
    ),
    (
        "gpu_thermal",
        h100,
        {"temperature__memory": 80, "processes": WORK},
        {"memory_limit": 80},
        ["WARN temperature-memory"],
    ),
    (
        "gpu_thermal",
        h100,
        {"power__limit": 500.0},
        {},
        ["WARN power-limit-low"],
    ),
    (
        "gpu_thermal",
        h100,
        {"power__limit": 500.0, "power__enforced_limit": 500.0},
        {"power_limit": 500.0},
        [],
    ),
    (
        "gpu_thermal",
        h100,
        {"power__limit": 400.0, "power__enforced_limit": 400.0},
        {"power_limit": 500.0},
        ["FAIL power-limit"],
    ),
    ("gpu_thermal", h100, {"power__enforced_limit": 350.0}, {}, ["WARN power-enforced"]),
    ("gpu_thermal", h100, {"power__draw": 0.0}, {}, ["WARN power-unreadable"]),
    # gpu_modes
    ("gpu_modes", h100, {"persistence": False}, {}, ["WARN persistence-off"]),
    ("gpu_modes", h100, {"persistence": False}, {"persistence": False}, []),
    ("gpu_modes", h100, {"mig": True, "mig_pending": True}, {}, []),
    ("gpu_modes", h100, {"mig": True, "mig_pending": True}, {"mig": "on"}, []),
    ("gpu_modes", h100, {"mig": True, "mig_pending": True}, {"mig": "off"}, ["FAIL mig-mode"]),
    ("gpu_modes", h100, {}, {"mig": "on"}, ["FAIL mig-mode"]),
    ("gpu_modes", h100, {"mig_pending": True}, {}, ["WARN mig-pending"]),
    ("gpu_modes", v100, {}, {"mig": "on"}, []),  # it has no MIG
    ("gpu_modes", h100, {"ecc__enabled": False, "ecc__pending": False}, {}, []),
    (
        "gpu_modes",
        h100,
        {"ecc__enabled": False, "ecc__pending": False},
        {"ecc": "on"},
        ["FAIL ecc-mode"],
    ),
    ("gpu_modes", h100, {}, {"ecc": "off"}, ["FAIL ecc-mode"]),
    ("gpu_modes", rtx4090, {}, {"ecc": "on"}, []),  # it has no ECC
    ("gpu_modes", h100, {"ecc__pending": False}, {}, ["WARN ecc-mode-pending"]),
    ("gpu_modes", h100, {"compute_mode": "exclusive_process"}, {}, []),
    (
        "gpu_modes",
        h100,
        {"compute_mode": "exclusive_process"},
        {"compute_mode": "default"},
        ["FAIL compute-mode"],
    ),
    ("gpu_modes", h100, {"compute_mode": "prohibited"}, {}, ["FAIL compute-mode"]),
    ("gpu_modes", h100, {"compute_mode": "prohibited"}, {"compute_mode": "prohibited"}, []),
    ("gpu_modes", h100, {}, {"mig": "yes"}, ["WARN modes-setting"]),
]


@pytest.mark.parametrize(("family", "model", "changes", "options", "expected"), ROWS)
def test_one_change(
    family: str, model: Any, changes: dict[str, Any], options: dict[str, Any], expected: list[str]
) -> None:
    device = change(model(0), **changes)
    system = gpu_node([device], options={family: options})
    found = check(family).run(system)
    assert [f"{f.status} {f.check}" for f in found] == expected
    for finding in found:
        assert finding.device in ("gpu0", "")
        assert "\n" not in finding.evidence and len(finding.evidence) < 400
        assert re.search("expected|limit|default|after the next|none of", finding.evidence)
        assert finding.check in {condition.check for condition in check(family).conditions}


@pytest.mark.parametrize("family", list(dict.fromkeys(row[0] for row in ROWS)))
def test_only_the_gpu_that_is_ill_is_named(family: str) -> None:
    rows = [row for row in ROWS if row[0] == family and row[4] and not row[3]]
    for _, model, changes, _, expected in rows:
        devices = [model(i) for i in range(8)]
        change(devices[5], **{k: v for k, v in changes.items() if k != "name"})
        if "name" in changes:
            for device in devices:
                device["name"] = changes["name"]
        found = check(family).run(gpu_node(devices))
        assert [f"{f.status} {f.check}" for f in found] == expected
        assert {f.device for f in found} == {"gpu5"}
