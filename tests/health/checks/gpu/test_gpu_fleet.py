"""Faults that GPU families tell only from other GPUs, the fleet or the node's history."""

from __future__ import annotations

from typing import Any

import pytest
from fake_gpus import DRIVER, gpu_node, h100
from fake_system import BOOT, NOW
from gpu_families import GONE, change, check, said

from health.finding import Finding
from health.node.system import Event


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


def test_maximum_clocks_against_the_fleet() -> None:
    devices = [h100(i) for i in range(4)]
    devices[2]["clocks"]["max_sm"] = 1755
    clocks = check("gpu_clocks")
    assert clocks.run(gpu_node(devices)) == []
    fleet = {"max_clocks": {"NVIDIA H100 80GB HBM3": {"sm": 1980, "memory": 2619}}}
    assert said(clocks.run(gpu_node(devices, fleet=fleet))) == [
        ("clocks-max", "FAIL", "gpu2", "none")
    ]
    assert clocks.run(gpu_node(devices[:1], fleet=fleet)) == []
    other = {"max_clocks": {"NVIDIA A100": {"sm": 9999}}}
    assert clocks.run(gpu_node(devices, fleet=other)) == []
    del devices[2]["clocks"]["max_sm"]
    assert clocks.run(gpu_node(devices, fleet=fleet)) == []


@pytest.mark.parametrize(
    ("limit", "enforced", "recorded", "options", "found"),
    [
        (700.0, 700.0, 0, {}, []),
        (750.0, 750.0, 0, {}, []),
        (500.0, 500.0, 0, {}, ["power-limit-low"]),
        (500.0, 500.0, 700, {}, ["power-recorded"]),
        (700.0, 350.0, 700, {}, ["power-recorded"]),  # the chassis or a cable, not the setting
        (500.0, 500.0, 500, {}, []),  # a site that caps all its boards
        (700.0, 500.0, 500, {}, []),  # and one whose chassis does
        (500.0, 499.7, 500, {}, []),
        (None, None, 500, {}, []),
        (500.0, 500.0, 700, {"power_limit": 500.0}, ["power-uneven"]),
        (400.0, 400.0, 700, {"power_limit": 500.0}, ["power-limit"]),
        (500.0, 500.0, "700", {}, ["power-limit-low"]),  # nothing usable was recorded
    ],
)
def test_the_power_limit_of_one_gpu(
    limit: float | None, enforced: float | None, recorded: Any, options: dict[str, Any],
    found: list[str],
) -> None:  # fmt: skip
    """Beside three GPUs at 700 W."""
    devices = [h100(i) for i in range(4)]
    for key, value in (("limit", limit), ("enforced_limit", enforced)):
        change(devices[2], **{f"power__{key}": GONE if value is None else value})
    fleet = {"power_limits": {"NVIDIA H100 80GB HBM3": recorded}} if recorded else {}
    system = gpu_node(devices, fleet=fleet, options={"gpu_thermal": options})
    told = check("gpu_thermal").run(system)
    assert [(f.check, f.device) for f in told] == [(name, "gpu2") for name in found]


def test_all_gpus_raised_but_one() -> None:
    devices = [change(h100(i), power__limit=750.0, power__enforced_limit=750.0) for i in range(3)]
    found = check("gpu_thermal").run(gpu_node([*devices, h100(3)]))
    assert said(found) == [("power-uneven", "WARN", "gpu3", "none")]
    assert check("gpu_thermal").run(gpu_node([devices[0], h100(3)])) == []  # one of two


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
    assert versions.run(gpu_node(devices)) == []
    fleet = {"vbios": {"NVIDIA H100 80GB HBM3": ["96.00.99.00.01"]}}
    assert said(versions.run(gpu_node(devices, fleet=fleet))) == [
        ("vbios-fleet", "FAIL", "gpu3", "none")
    ]
    both = {"vbios": {"NVIDIA H100 80GB HBM3": ["96.00.99.00.01", "96.00.30.00.01"]}}
    assert versions.run(gpu_node(devices, fleet=both)) == []
