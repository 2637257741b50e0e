"""Temperature against the board's own thresholds; power limits against its default and its like."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

GPU = Condition(
    "temperature-gpu",
    "FAIL",
    "node",
    "none",
    "an idle GPU at its slowdown threshold minus `margin`, or at `gpu_limit` (WARN on a busy GPU)",
)
MEMORY = Condition(
    "temperature-memory",
    "FAIL",
    "node",
    "none",
    "memory of an idle GPU hotter than its maximum, or at `memory_limit` (WARN on a busy GPU)",
)
HBM = Condition(
    "temperature-hbm",
    "WARN",
    "node",
    "none",
    "HBM hotter than `hbm_limit`, on a board that reports no maximum for its memory",
)
LIMIT = Condition("power-limit", "FAIL", "node", "none", "the power limit is below `power_limit`")
LIMIT_LOW = Condition(
    "power-limit-low",
    "WARN",
    "node",
    "none",
    "the power limit is below the board's default, and no limit is set or recorded",
)
RECORDED = Condition(
    "power-recorded",
    "WARN",
    "node",
    "none",
    "the power limit in force is below what the fleet recorded, and no limit is set here",
)
UNEVEN = Condition(
    "power-uneven",
    "WARN",
    "node",
    "none",
    "the power limit in force is below that of most GPUs of the model in this node",
)
ENFORCED = Condition(
    "power-enforced",
    "WARN",
    "node",
    "none",
    "a lower limit than the one set is enforced (power cables, the chassis), and no limit is "
    "recorded",
)
NO_POWER = Condition(
    "power-unreadable",
    "WARN",
    "node",
    "none",
    "the board does not report its power draw, or reports 0 W",
)
UNREADABLE = Condition(
    "temperature-unreadable", "WARN", "node", "none", "NVML did not report a temperature"
)

SETTINGS = {
    "margin": Setting(5, "smallest distance to the slowdown threshold that is not reported", "°C"),
    "gpu_limit": Setting(
        0, "GPU temperature limit; 0: the board's slowdown threshold minus the margin", "°C"
    ),
    "memory_limit": Setting(0, "memory temperature limit; 0: the board's maximum", "°C"),
    "hbm_limit": Setting(
        95, "highest HBM temperature of a board that reports no maximum; 0: none", "°C"
    ),
    "power_limit": Setting(
        0.0, "power limit required by the site; 0: the recorded limit or the board's default", "W"
    ),
}

# Thresholds below this are not temperatures: some boards answer 0 or a margin.
_PLAUSIBLE = 50
# Boards with HBM. NVML no longer promises a memory threshold from Ada on (nvml.h,
# nvmlDeviceGetTemperatureThreshold), and a T.Limit counts down to a maximum that it does not name.
# HBM of Hopper is reported to throttle from 95 °C on; GDDR may be hotter and gets no limit here.
_HBM = re.compile(r"\b(?:V100|A30|A[18]00|H(?:20|[128]00)|GH200|G?B[123]00)\b")


def run(system: System) -> list[Finding]:
    """Findings about the temperature and power of every GPU."""
    options = system.options("gpu_thermal")
    found = []
    devices = gpus.devices(system)
    for device in devices:
        model = device.get("name", "")
        recorded = gpus.recorded(system, "power_limits", model)
        same = [_in_force(other) for other in devices if other.get("name", "") == model]
        usual = gpus.majority([limit for limit in same if limit]) or 0
        found += _temperature(device, options)
        found += _power_draw(device)
        known = recorded if isinstance(recorded, int) else 0
        found += _power_limit(device, options["power_limit"], known, usual)
    return found


def _temperature(device: Device, options: Mapping[str, Any]) -> list[Finding]:
    values, name = device.get("temperature", {}), gpus.name(device)
    idle = gpus.idle(device)
    work = "idle" if idle else "busy"
    found = gpus.unreadable(UNREADABLE, device, "temperature")
    slowdown, most = values.get("slowdown", 0), values.get("memory_max", 0)
    memory, most, known = MEMORY, *_limit(options["memory_limit"], most, 1)
    if not most and options["hbm_limit"] and _HBM.search(device.get("name", "")):
        memory, most, known = HBM, options["hbm_limit"] + 1, "hbm_limit; the board reports none"
    for condition, now, limit, source in (
        (GPU, values.get("gpu"), *_limit(options["gpu_limit"], slowdown, -options["margin"])),
        (memory, values.get("memory"), most, known),
    ):
        if now is not None and limit and now >= limit:
            what = (
                f"{work} GPU"
                if condition is GPU
                else f"memory of {'an' if idle else 'a'} {work} GPU"
            )
            text = f"{what} at {now} °C, limit below {limit} °C ({source})"
            status = condition.status if idle else "WARN"
            found.append(
                condition.found(f"{text}{gpus.identity(device)} (NVML)", name, status=status)
            )
    return found


def _limit(setting: int, threshold: int, offset: int) -> tuple[int, str]:
    """The temperature that is too hot (0: unknown) and where it comes from."""
    if setting:
        return setting, "robust.toml"
    if threshold < _PLAUSIBLE:
        return 0, ""
    return threshold + offset, f"the board's threshold {threshold} °C"


def _power_draw(device: Device) -> list[Finding]:
    draw = device.get("power", {}).get("draw", 1.0)
    found = gpus.unreadable(NO_POWER, device, "power")
    if not found and draw <= 0:
        text = f"power draw {draw} W, expected more (NVML)"
        found.append(NO_POWER.found(text, gpus.name(device)))
    return found


def _in_force(device: Device) -> int:
    """The power limit that holds after all limiters, in W; 0: not told."""
    power = device.get("power", {})
    return round(power.get("enforced_limit", 0.0) or power.get("limit", 0.0))


def _power_limit(device: Device, wanted: float, recorded: int, usual: int) -> list[Finding]:
    """Check a power limit against the site's, else the fleet's record, else the board's default."""
    power, name = device.get("power", {}), gpus.name(device)
    limit, default = power.get("limit", 0.0), power.get("default_limit", 0.0)
    now, model = _in_force(device), device.get("name", "")
    if recorded and not wanted:
        if not now or now >= recorded:
            return []
        text = f"power limit in force {now} W, {recorded} W recorded for {model}"
        return [RECORDED.found(f"{text} (fleet power_limits)", name)]
    found = []
    if wanted and limit and limit < wanted:
        text = f"power limit {limit:.0f} W, expected {wanted:.0f} W"
        found.append(LIMIT.found(f"{text} ([health.gpu_thermal] power_limit)", name))
    elif not wanted and limit and limit < default:
        text = f"power limit {limit:.0f} W, the board's default is {default:.0f} W (NVML)"
        found.append(LIMIT_LOW.found(text, name))
    if now and now < round(limit):
        text = f"enforced power limit {now} W, set to {limit:.0f} W (NVML)"
        found.append(ENFORCED.found(text, name))
    if now and now < usual and not found:
        text = f"power limit in force {now} W, most {model} of this node have {usual} W (NVML)"
        found.append(UNEVEN.found(text, name))
    return found


CHECK = Check(
    "gpu_thermal",
    run,
    (GPU, MEMORY, HBM, LIMIT, LIMIT_LOW, RECORDED, UNEVEN, ENFORCED, NO_POWER, UNREADABLE),
    SETTINGS,
    needs_nvml=True,
    closes_on_error=False,
    cost_ms=0.1,
)
