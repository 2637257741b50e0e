"""Versions of driver and VBIOS: those that the fleet has, and the same all over the node."""

from __future__ import annotations

import re
from typing import Any

from health.check import Check, Condition
from health.finding import Finding
from health.node.system import System
from health.nvidia import gpus
from health.nvidia.snapshot import Device

MIXED = Condition(
    "driver-mixed",
    "FAIL",
    "node",
    "reboot",
    "NVML's driver version is not that of the loaded kernel module",
)
DRIVER = Condition(
    "driver-fleet", "FAIL", "node", "none", "the driver is none of those the fleet recorded"
)
VBIOS = Condition(
    "vbios-fleet",
    "FAIL",
    "node",
    "none",
    "a VBIOS is none of those the fleet recorded for the model",
)
UNEVEN = Condition(
    "vbios-uneven",
    "WARN",
    "node",
    "none",
    "GPUs of one model have different VBIOS, and the fleet recorded none",
)

_MODULE = "/sys/module/nvidia/version"
_PROC = "/proc/driver/nvidia/version"
# "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build"
_NVRM = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s")


def run(system: System) -> list[Finding]:
    """Findings about the driver, then about the boards."""
    found = []
    now = system.nvml().get("driver", "")
    loaded, source = _loaded(system)
    if now and loaded and now != loaded:
        found.append(MIXED.found(f"driver {now} (NVML), {loaded} loaded ({source})"))
    allowed = _allowed(gpus.recorded(system, "driver"))
    version = now or loaded
    if version and allowed and version not in allowed:
        text = f"driver {version} ({'NVML' if now else source})"
        found.append(DRIVER.found(f"{text}, recorded {' or '.join(allowed)} (fleet driver)"))
    devices = gpus.devices(system)
    for model in dict.fromkeys(device.get("name", "") for device in devices):
        found += _vbios(
            [d for d in devices if d.get("name", "") == model and d.get("vbios")],
            model,
            _allowed(gpus.recorded(system, "vbios", model)),
        )
    return found


def _loaded(system: System) -> tuple[str, str]:
    """The loaded module's version and the file that tells it; empty if neither does."""
    try:
        return system.read(_MODULE).strip(), _MODULE
    except OSError:
        pass
    try:
        match = _NVRM.search(system.read(_PROC))
    except OSError:
        return "", ""
    return (match[1], _PROC) if match else ("", "")


def _allowed(recorded: Any) -> list[str]:
    """One version or several, as they were recorded."""
    if isinstance(recorded, str):
        return [recorded]
    values = recorded if isinstance(recorded, list | tuple) else []
    return [value for value in values if isinstance(value, str)]


def _vbios(devices: list[Device], model: str, allowed: list[str]) -> list[Finding]:
    if allowed:
        return [
            VBIOS.found(
                f"VBIOS {d['vbios']}, recorded {' or '.join(allowed)} for {model} (fleet vbios)",
                gpus.name(d),
            )
            for d in devices
            if d["vbios"] not in allowed
        ]
    versions = sorted({d["vbios"] for d in devices})
    if len(versions) < 2:
        return []
    parts = (
        f"{version} on {' '.join(gpus.name(d) for d in devices if d['vbios'] == version)}"
        for version in versions
    )
    return [UNEVEN.found(f"{len(versions)} VBIOS among {model}: {', '.join(parts)} (NVML)")]


CHECK = Check(
    "gpu_versions",
    run,
    (MIXED, DRIVER, VBIOS, UNEVEN),
    {},
    needs_nvml=True,
    closes_on_error=False,
    cost_ms=0.1,
)
