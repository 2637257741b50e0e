"""What the GPU families say of every state that a board can be in, by tables."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_gpus import DRIVER, MODELS, a100, gb200, gpu_node, h100, rtx4090, snapshot, v100
from fake_system import BOOT, NOW, FakeSystem

import health
from health.check import Check
from health.finding import ACTIONS, Finding
from health.system import Event

FAMILIES = (
    "gpu_count",
    "nvml",
    "gpu_recovery",
    "gpu_ecc",
    "gpu_memory",
    "gpu_clocks",
    "gpu_thermal",
    "gpu_pcie",
    "nvlink",
    "gpu_modes",
    "gpu_versions",
    "gpu_leftovers",
)
WORK = [{"pid": 4711, "memory": 1 << 30, "kind": "compute"}]
GONE = object()


def check(family: str) -> Check:
    found = importlib.import_module(f"health.checks.{family}").CHECK
    assert isinstance(found, Check)
    return found


def change(device: Any, **values: Any) -> Any:
    """Set keys of a device: ecc__volatile_uncorrected=2; GONE takes one away."""
    for path, value in values.items():
        *groups, key = path.split("__")
        target = device
        for group in groups:
            target = target.setdefault(group, {})
        if value is GONE:
            target.pop(key, None)
        else:
            target[key] = value
    return device


def said(findings: list[Finding]) -> list[tuple[str, str, str, str]]:
    return [(f.check, f.status, f.device, f.action) for f in findings]


# --- every family, every model


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
    """Whether the driver is slow or hangs: what it did not come to tell is unknown, not broken."""
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


# --- what the driver refused to tell

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


# --- one change of one healthy board, what the family says, and with which settings

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
        assert re.search("wanted|limit|default|after the next|none of", finding.evidence)
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


# --- what needs more than one GPU, the fleet or the history


def test_corrected_errors_are_counted_since_the_reset() -> None:
    device = change(h100(0), ecc__volatile_corrected=100_000)
    assert check("gpu_ecc").run(gpu_node([device])) == []
    hours = 5 * 3600

    def after(kind: str, boot: str = BOOT, **data: str) -> list[Finding]:
        event = Event(NOW - hours, kind, boot, data)
        return check("gpu_ecc").run(gpu_node([device], history=[event]))

    assert said(after("reset", gpu="gpu0")) == [("ecc-corrected-rate", "WARN", "gpu0", "none")]
    assert said(after("reset", gpu=device["pci"])) == said(after("reset", gpu="gpu0"))
    assert said(after("reset", gpu="")) == said(after("reset", gpu="gpu0"))
    assert said(after("driver")) == said(after("reset", gpu="gpu0"))
    assert after("reset", gpu="gpu7") == []
    assert after("drain") == []
    assert after("reset", boot="another", gpu="gpu0") == []


def test_maximum_clocks_against_the_fleet_and_the_other_gpus() -> None:
    devices = [h100(i) for i in range(4)]
    devices[2]["clocks"]["max_sm"] = 1755
    clocks = check("gpu_clocks")
    assert said(clocks.run(gpu_node(devices))) == [("clocks-uneven", "WARN", "gpu2", "none")]
    fleet = {"max_clocks": {"NVIDIA H100 80GB HBM3": {"sm": 1980, "memory": 2619}}}
    assert said(clocks.run(gpu_node(devices, fleet=fleet))) == [
        ("clocks-max", "FAIL", "gpu2", "none")
    ]
    assert clocks.run(gpu_node(devices[:1], fleet=fleet)) == []
    other = {"max_clocks": {"NVIDIA A100": {"sm": 9999}}}
    assert said(clocks.run(gpu_node(devices, fleet=other)))[0][0] == "clocks-uneven"
    assert clocks.run(gpu_node([devices[2]])) == []
    del devices[2]["clocks"]["max_sm"]
    assert clocks.run(gpu_node(devices, fleet=fleet)) == []


def test_ecc_off_on_one_of_many() -> None:
    devices = [h100(i) for i in range(4)]
    devices[1]["ecc"].update(enabled=False, pending=False)
    found = check("gpu_modes").run(gpu_node(devices))
    assert said(found) == [("ecc-mode-uneven", "WARN", "gpu1", "reset-gpu")]


@pytest.mark.parametrize(
    ("files", "driver", "fleet", "expected"),
    [
        ({}, DRIVER, {}, []),
        ({}, DRIVER, {"driver": [DRIVER]}, []),
        ({}, DRIVER, {"driver": DRIVER}, []),
        ({}, DRIVER, {"driver": ["1.2", DRIVER]}, []),
        ({}, DRIVER, {"driver": ["1.2"]}, ["driver-fleet"]),
        ({}, DRIVER, {"driver": 570}, []),  # nothing usable was recorded
        ({"/sys/module/nvidia/version": "550.1\n"}, DRIVER, {}, ["driver-mixed"]),
        ({}, "", {"driver": ["1.2"]}, ["driver-fleet"]),
        (
            {
                "/sys/module/nvidia/version": FileNotFoundError(2, "gone"),
                "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for "
                "x86_64  550.54.15  Release Build  (dvs-builder@U16)\nGCC version: 12\n",
            },
            DRIVER,
            {},
            ["driver-mixed"],
        ),
        (
            {
                "/sys/module/nvidia/version": FileNotFoundError(2, "gone"),
                "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
                f"{DRIVER}  Sat Aug 26 01:15:15 UTC 2023\n",
            },
            DRIVER,
            {},
            [],
        ),
        ({"/sys/module/nvidia/version": FileNotFoundError(2, "gone")}, DRIVER, {}, []),
    ],
)
def test_driver_versions(
    files: dict[str, Any], driver: str, fleet: dict[str, Any], expected: list[str]
) -> None:
    system = gpu_node([h100(0)], files=files, fleet=fleet)
    system.snapshot["driver"] = driver
    assert [f.check for f in check("gpu_versions").run(system)] == expected


def test_vbios() -> None:
    versions = check("gpu_versions")
    devices = [h100(i) for i in range(4)]
    devices[3]["vbios"] = "96.00.30.00.01"
    found = versions.run(gpu_node(devices))
    assert said(found) == [("vbios-uneven", "WARN", "", "none")]
    assert "96.00.30.00.01 on gpu3" in found[0].evidence
    fleet = {"vbios": {"NVIDIA H100 80GB HBM3": ["96.00.99.00.01"]}}
    assert said(versions.run(gpu_node(devices, fleet=fleet))) == [
        ("vbios-fleet", "FAIL", "gpu3", "none")
    ]
    both = {"vbios": {"NVIDIA H100 80GB HBM3": ["96.00.99.00.01", "96.00.30.00.01"]}}
    assert versions.run(gpu_node(devices, fleet=both)) == []
