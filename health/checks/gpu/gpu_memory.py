"""Repairs of the GPU's memory: remapped rows (from Ampere on), retired pages (before).

NVIDIA's rules (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt, .../dynamic-page-retirement): a
failed remap is a criterion for return; a pending one becomes real at the next reset and does not
keep work from a GPU that contains its errors. Limits of retired pages are those of NVIDIA's field
diagnostic, taken from DCGM (common/DcgmGPUHardwareLimits.h).
"""

from __future__ import annotations

from health.check import Check, Condition, Setting
from health.checks.gpu.gpu_ecc import contains_errors
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

FAILED = Condition(
    "remap-failed", "FAIL", "node", "service", "a row could not be remapped (criterion for return)"
)
PENDING = Condition(
    "remap-pending", "WARN", "node", "reset-gpu", "a row is remapped at the next reset"
)
PENDING_UNSAFE = Condition(
    "remap-pending-unsafe",
    "FAIL",
    "node",
    "reset-gpu",
    "the same after an uncorrectable error, on a GPU without error containment",
)
NO_SPARE = Condition(
    "remap-no-spare",
    "WARN",
    "node",
    "service",
    "banks have no spare row left: the next bad row there cannot be remapped",
)
MANY = Condition(
    "remap-many", "WARN", "node", "service", "`remapped` rows or more for uncorrectable errors"
)
RETIRED = Condition(
    "pages-retired", "FAIL", "node", "service", "`retired` pages or more (criterion for return)"
)
RETIRED_DOUBLE = Condition(
    "pages-retired-double",
    "WARN",
    "node",
    "service",
    "more than `retired_double` pages for double-bit errors",
)
PAGES_PENDING = Condition(
    "pages-pending", "WARN", "node", "reset-gpu", "a page is retired at the next reset"
)
PAGES_UNSAFE = Condition(
    "pages-pending-unsafe",
    "FAIL",
    "node",
    "reset-gpu",
    "the same after an uncorrectable error: the driver starts no new work before a reset",
)
UNREADABLE = Condition(
    "remap-unreadable", "ERROR", "node", "reboot", "NVML did not report remapped rows or pages"
)

SETTINGS = {
    "remapped": Setting(512, "rows remapped for uncorrectable errors; the hardware has 512"),
    "retired": Setting(63, "retired pages (before Ampere); the hardware has 64"),
    "retired_double": Setting(15, "retired pages for double-bit errors"),
}


def run(system: System) -> list[Finding]:
    """Findings about the repairs of every GPU's memory."""
    options = system.options("gpu_memory")
    found = []
    for device in gpus.devices(system):
        name, board = gpus.name(device), gpus.identity(device)
        found += gpus.unreadable(UNREADABLE, device, "remap", "retired", board=board)
        found += _remapped(device, options["remapped"], name, f"{board} (NVML remapped rows)")
        found += _retired(
            device,
            options["retired"],
            options["retired_double"],
            name,
            f"{board} (NVML retired pages)",
        )
    return found


def _after_uncorrectable(device: Device) -> bool:
    """True if an uncorrectable error may be the cause; so also if its counter cannot be read."""
    return device.get("ecc", {}).get("volatile_uncorrected", 1) > 0


def _remapped(device: Device, limit: int, name: str, source: str) -> list[Finding]:
    remap = device.get("remap", {})
    found = []
    if remap.get("failed"):
        found.append(FAILED.found(f"remapping failure: yes, expected no{source}", name))
    if remap.get("pending"):
        unsafe = _after_uncorrectable(device) and not contains_errors(device)
        condition = PENDING_UNSAFE if unsafe else PENDING
        found.append(condition.found(f"remapping pending: yes, expected no{source}", name))
    banks = remap.get("spare_none", 0)
    if banks:
        found.append(NO_SPARE.found(f"{banks} banks without a spare row, limit 0{source}", name))
    rows = remap.get("uncorrected", 0)
    if rows >= limit:
        text = f"{rows} rows remapped for uncorrectable errors, limit below {limit}"
        found.append(MANY.found(f"{text}{source}", name))
    return found


def _retired(
    device: Device, limit: int, double_limit: int, name: str, source: str
) -> list[Finding]:
    retired = device.get("retired", {})
    single, double = retired.get("single", 0), retired.get("double", 0)
    found = []
    if single + double >= limit:
        text = f"{single + double} retired pages, limit below {limit}"
        found.append(RETIRED.found(f"{text}{source}", name))
    elif double > double_limit:
        text = f"{double} pages retired for double-bit errors, limit {double_limit}"
        found.append(RETIRED_DOUBLE.found(f"{text}{source}", name))
    if retired.get("pending"):
        condition = PAGES_UNSAFE if _after_uncorrectable(device) else PAGES_PENDING
        found.append(condition.found(f"page retirement pending: yes, expected no{source}", name))
    return found


CHECK = Check(
    "gpu_memory",
    run,
    (
        FAILED,
        PENDING,
        PENDING_UNSAFE,
        NO_SPARE,
        MANY,
        RETIRED,
        RETIRED_DOUBLE,
        PAGES_PENDING,
        PAGES_UNSAFE,
        UNREADABLE,
    ),
    SETTINGS,
    needs_nvml=True,
    cost_ms=0.1,
)
