"""GPU clocks that are held down: throttle reasons, application and maximum clocks.

One moment is seen, so only what is wrong at any moment fails: an idle GPU that is slowed
down by its thermal or power protection. That its clocks are low when idle, capped by its power
limit or by settings is ordinary. The plain "HW slowdown" may also show while the GPU changes its
performance state (nvml.h, nvmlClocksEventReasonHwSlowdown): alone it is a warning.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

THERMAL = Condition(
    "clocks-thermal",
    "FAIL",
    "node",
    "none",
    "HW thermal slowdown on an idle GPU (WARN on a busy GPU)",
)
BRAKE = Condition(
    "clocks-power-brake",
    "FAIL",
    "node",
    "none",
    "HW power brake (the power supply's alarm) on an idle GPU (WARN on a busy GPU)",
)
SLOWDOWN = Condition(
    "clocks-slowdown", "WARN", "node", "none", "HW slowdown for which NVML reports no reason"
)
SW_THERMAL = Condition(
    "clocks-sw-thermal", "WARN", "node", "none", "SW thermal slowdown on an idle GPU"
)
APPLICATION = Condition(
    "clocks-application",
    "FAIL",
    "node",
    "none",
    "application clocks below `application_sm` or `application_memory`",
)
BELOW_DEFAULT = Condition(
    "clocks-below-default",
    "WARN",
    "node",
    "none",
    "application clocks below the board's default, and no setting for them",
)
MAXIMUM = Condition(
    "clocks-max", "FAIL", "node", "none", "maximum clocks below what the fleet recorded"
)
UNREADABLE = Condition(
    "clocks-unreadable", "WARN", "node", "none", "NVML did not report clocks or throttle reasons"
)

SETTINGS = {
    "application_sm": Setting(0, "application clock of the SMs; 0: the board's default", "MHz"),
    "application_memory": Setting(
        0, "application clock of the memory; 0: the board's default", "MHz"
    ),
}

# nvmlClocksEventReason*
_HW_SLOWDOWN = 0x08
_SW_THERMAL = 0x20
_HW_THERMAL = 0x40
_HW_BRAKE = 0x80


def run(system: System) -> list[Finding]:
    """Findings about the clocks of every GPU."""
    options = system.options("gpu_clocks")
    found = []
    for device in gpus.devices(system):
        found += gpus.unreadable(UNREADABLE, device, "throttle", "clocks")
        found += _throttled(device)
        found += _application(device, options)
        found += _maximum(system, device)
    return found


def _throttled(device: Device) -> list[Finding]:
    mask, name = device.get("throttle", 0), gpus.name(device)
    idle = gpus.idle(device)
    heat = device.get("temperature", {}).get("gpu")
    work = "an idle" if idle else "a busy"
    at = f" at {heat} °C" if heat is not None else ""
    text = f"active on {work} GPU{at} (expected: none)"
    source = f"{gpus.identity(device)} (NVML clocks event reasons 0x{mask:x})"
    found = []
    for bit, reason, condition in (
        (_HW_THERMAL, "HW thermal slowdown", THERMAL),
        (_HW_BRAKE, "HW power brake", BRAKE),
    ):
        if mask & bit:
            status = condition.status if idle else "WARN"
            found.append(condition.found(f"{reason} {text}{source}", name, status=status))
    if mask & _HW_SLOWDOWN and not mask & (_HW_THERMAL | _HW_BRAKE):
        found.append(SLOWDOWN.found(f"HW slowdown {text}{source}", name))
    if mask & _SW_THERMAL and idle:
        found.append(SW_THERMAL.found(f"SW thermal slowdown {text}{source}", name))
    return found


def _application(device: Device, options: Mapping[str, Any]) -> list[Finding]:
    found = []
    for kind in ("sm", "memory"):
        now, default = _clock(device, f"app_{kind}"), _clock(device, f"default_app_{kind}")
        wanted = options[f"application_{kind}"]
        if now is None:
            continue
        if wanted and now < wanted:
            text = f"{kind} application clock {now} MHz, expected {wanted}"
            source = f"[health.gpu_clocks] application_{kind}"
            found.append(APPLICATION.found(f"{text} ({source})", gpus.name(device)))
        elif not wanted and default and now < default:
            text = f"{kind} application clock {now} MHz, the board's default is {default}"
            cure = "nvidia-smi --reset-applications-clocks"
            found.append(BELOW_DEFAULT.found(f"{text} (NVML); {cure}", gpus.name(device)))
    return found


def _maximum(system: System, device: Device) -> list[Finding]:
    model = device.get("name", "")
    recorded = gpus.recorded(system, "max_clocks", model)
    found = []
    for kind in ("sm", "memory"):
        now = _clock(device, f"max_{kind}")
        wanted = recorded.get(kind) if isinstance(recorded, Mapping) else None
        if now is not None and isinstance(wanted, int) and now < wanted:
            text = f"maximum {kind} clock {now} MHz, {wanted} recorded for {model}"
            found.append(MAXIMUM.found(f"{text} (fleet max_clocks)", gpus.name(device)))
    return found


def _clock(device: Device, key: str) -> int | None:
    return cast("Mapping[str, int]", device.get("clocks", {})).get(key)


CHECK = Check(
    "gpu_clocks",
    run,
    (
        THERMAL,
        BRAKE,
        SLOWDOWN,
        SW_THERMAL,
        APPLICATION,
        BELOW_DEFAULT,
        MAXIMUM,
        UNREADABLE,
    ),
    SETTINGS,
    needs_nvml=True,
    closes_on_error=False,
    cost_ms=0.2,
)
