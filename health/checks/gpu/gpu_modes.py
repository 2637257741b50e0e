"""GPU modes that are not those the site wants: persistence, MIG, ECC, compute mode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

PERSISTENCE = Condition(
    "persistence-off", "WARN", "node", "none", "persistence mode is off and `persistence` is true"
)
MIG = Condition("mig-mode", "FAIL", "node", "reset-gpu", "the MIG mode differs from `mig`")
MIG_PENDING = Condition(
    "mig-pending", "WARN", "node", "reset-gpu", "another MIG mode takes effect at the next reset"
)
ECC = Condition("ecc-mode", "FAIL", "node", "reset-gpu", "the ECC mode differs from `ecc`")
ECC_PENDING = Condition(
    "ecc-mode-pending", "WARN", "node", "reset-gpu", "another ECC mode takes effect at the reset"
)
ECC_UNEVEN = Condition(
    "ecc-mode-uneven",
    "WARN",
    "node",
    "reset-gpu",
    "ECC is off, on for most GPUs of the model in this node",
)
COMPUTE = Condition(
    "compute-mode",
    "FAIL",
    "node",
    "none",
    "the compute mode differs from `compute_mode`, or prohibits all work",
)
SETTING = Condition(
    "modes-setting", "WARN", "tool", "none", "a setting of this family has an invalid value"
)
UNREADABLE = Condition("modes-unreadable", "WARN", "node", "none", "NVML did not report a mode")

_SWITCH = ("any", "on", "off")
_COMPUTE_MODES = ("any", "default", "exclusive_process", "prohibited")
SETTINGS = {
    "persistence": Setting(True, "persistence mode must be on"),
    "mig": Setting("any", '"on", "off" or "any"'),
    "ecc": Setting("any", '"on", "off" or "any"'),
    "compute_mode": Setting("any", '"default", "exclusive_process", "prohibited" or "any"'),
}


def run(system: System) -> list[Finding]:
    """Findings about the modes of every GPU."""
    options = dict(system.options("gpu_modes"))
    found = []
    for key, values in (("mig", _SWITCH), ("ecc", _SWITCH), ("compute_mode", _COMPUTE_MODES)):
        if options[key] not in values:
            text = f"[health.gpu_modes] {key} = {options[key]!r} is none of {', '.join(values)}"
            found.append(SETTING.found(f"{text}; taken as any"))
            options[key] = "any"
    devices = gpus.devices(system)
    for device in devices:
        found += gpus.unreadable(UNREADABLE, device, "persistence", "mig", "compute_mode")
        found += _persistence(device, options)
        found += _mig(device, options["mig"])
        found += _ecc(device, devices, options["ecc"])
        found += _compute(device, options["compute_mode"])
    return found


def _persistence(device: Device, options: Mapping[str, Any]) -> list[Finding]:
    if options["persistence"] and device.get("persistence") is False:
        text = "persistence mode off, expected on: start nvidia-persistenced (NVML)"
        return [PERSISTENCE.found(text, gpus.name(device))]
    return []


def _mig(device: Device, wanted: str) -> list[Finding]:
    now, pending = device.get("mig"), device.get("mig_pending")
    if now is None:
        return []
    if wanted != "any" and _word(now) != wanted:
        text = f"MIG {_word(now)}, expected {wanted} ([health.gpu_modes] mig)"
        return [MIG.found(text, gpus.name(device))]
    if pending is not None and pending != now:
        text = f"MIG {_word(now)}, {_word(pending)} after the next reset (NVML)"
        return [MIG_PENDING.found(text, gpus.name(device))]
    return []


def _ecc(device: Device, devices: list[Device], wanted: str) -> list[Finding]:
    ecc, name = device.get("ecc", {}), gpus.name(device)
    now, pending = ecc.get("enabled"), ecc.get("pending")
    if now is None:
        return []
    if wanted != "any" and _word(now) != wanted:
        text = f"ECC {_word(now)}, expected {wanted} ([health.gpu_modes] ecc)"
        return [ECC.found(text, name)]
    if pending is not None and pending != now:
        text = f"ECC {_word(now)}, {_word(pending)} after the next reset or boot (NVML)"
        return [ECC_PENDING.found(text, name)]
    model = device.get("name", "")
    same = [d.get("ecc", {}).get("enabled") for d in devices if d.get("name", "") == model]
    if not now and gpus.majority([int(value) for value in same if value is not None]) == 1:
        return [ECC_UNEVEN.found(f"ECC off, on for most {model} of this node (NVML)", name)]
    return []


def _compute(device: Device, wanted: str) -> list[Finding]:
    now = device.get("compute_mode")
    if now is None or now == wanted or (wanted == "any" and now != "prohibited"):
        return []
    allowed = "anything but prohibited" if wanted == "any" else wanted
    text = f"compute mode {now}, expected {allowed} ([health.gpu_modes] compute_mode)"
    return [COMPUTE.found(text, gpus.name(device))]


def _word(on: bool) -> str:
    return "on" if on else "off"


CHECK = Check(
    "gpu_modes",
    run,
    (
        PERSISTENCE,
        MIG,
        MIG_PENDING,
        ECC,
        ECC_PENDING,
        ECC_UNEVEN,
        COMPUTE,
        SETTING,
        UNREADABLE,
    ),
    SETTINGS,
    needs_nvml=True,
    closes_on_error=False,
    cost_ms=0.1,
)
