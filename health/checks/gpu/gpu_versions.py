"""Versions of driver and VBIOS: those that the fleet has."""

from __future__ import annotations

import re
from typing import Any

from health.check import Check, Condition
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

MIXED = Condition(
    "driver-mixed",
    "FAIL",
    "node",
    "reboot",
    "NVML's driver version is not that of the loaded kernel module",
)
DRIVER = Condition(
    "driver-fleet", "FAIL", "node", "none", "the driver is not one that the fleet recorded"
)
VBIOS = Condition(
    "vbios-fleet",
    "FAIL",
    "node",
    "none",
    "a VBIOS is not one that the fleet recorded for the model",
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
    for device in gpus.devices(system):
        found += _vbios(system, device)
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


def _vbios(system: System, device: Device) -> list[Finding]:
    model, now = device.get("name", ""), device.get("vbios", "")
    allowed = _allowed(gpus.recorded(system, "vbios", model))
    if not now or not allowed or now in allowed:
        return []
    text = f"VBIOS {now}, recorded {' or '.join(allowed)} for {model} (fleet vbios)"
    return [VBIOS.found(text, gpus.name(device))]


CHECK = Check(
    "gpu_versions",
    run,
    (MIXED, DRIVER, VBIOS),
    {},
    needs_nvml=True,
    closes_on_error=False,
    cost_ms=0.1,
)
