"""The GPU families of checks, changes of a healthy GPU, and what was found, briefly."""

from __future__ import annotations

from typing import Any

from health import checks
from health.check import Check
from health.finding import Finding

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
GONE = object()


def check(family: str) -> Check:
    return checks.load(family)


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
