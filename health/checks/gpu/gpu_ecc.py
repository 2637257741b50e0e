"""ECC counters: errors that cost results, and how a board wears.

NVIDIA's rule (docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt): from A100 on, an uncorrectable
error in DRAM is contained: the page is taken out of use, only the program that met it ends, and
new work may start; where more is needed the driver says so in its recovery action. Boards before
that, and those without containment, want a reset before they are used again.
"""

from __future__ import annotations

import re

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import gpus

UNCORRECTED = Condition(
    "ecc-uncorrected",
    "FAIL",
    "node",
    "reset-gpu",
    "uncorrectable errors since the last reset, on a GPU without error containment, or more than "
    "`contained` of them",
)
CONTAINED = Condition(
    "ecc-contained",
    "WARN",
    "node",
    "reset-gpu",
    "uncorrectable errors since the last reset that the GPU contained",
)
RATE = Condition(
    "ecc-corrected-rate",
    "WARN",
    "node",
    "none",
    "more corrected errors per hour than `corrected_per_hour`",
)
LIFETIME = Condition(
    "ecc-lifetime",
    "WARN",
    "node",
    "service",
    "more uncorrectable errors over the board's life than `lifetime_uncorrected`",
)
SRAM = Condition(
    "ecc-sram-threshold",
    "FAIL",
    "node",
    "service",
    "the board reports too many uncorrectable errors in its SRAM (a criterion for return)",
)
UNREADABLE = Condition(
    "ecc-unreadable", "ERROR", "node", "reboot", "NVML did not report the ECC counters"
)

SETTINGS = {
    "uncorrected": Setting(0, "tolerated uncorrectable errors since the last reset"),
    "contained": Setting(
        3,
        "the same for GPUs that contain such errors: each error ends one program, and a reset "
        "repairs the memory",
    ),
    "corrected_per_hour": Setting(10000.0, "corrected errors, on average since the last reset"),
    "lifetime_uncorrected": Setting(100, "uncorrectable errors over the life of the board"),
}

# GA100, GH100 and the data-centre Blackwells; by name, for drivers without a recovery action.
_CONTAINING = re.compile(r"\b(?:A30|A[18]00|H(?:20|[128]00)|GH200|G?B[123]00)\b")


def contains_errors(device: Device) -> bool:
    """True if the GPU stays usable after an uncorrectable error in DRAM, as far as is known."""
    action = device.get("recovery_action")
    if action is not None:
        return action == 0
    return bool(_CONTAINING.search(device.get("name", "")))


def run(system: System) -> list[Finding]:
    """Findings about the counters of every GPU."""
    options = system.options("gpu_ecc")
    found = []
    for device in gpus.devices(system):
        name, board = gpus.name(device), gpus.identity(device)
        ecc = device.get("ecc", {})
        found += gpus.unreadable(UNREADABLE, device, "ecc", board=board)
        if ecc.get("sram_threshold_exceeded"):
            text = "SRAM threshold exceeded: yes, expected no"
            found.append(SRAM.found(f"{text}{board} (NVML SRAM ECC error status)", name))
        count = ecc.get("volatile_uncorrected", 0)
        if count > options["uncorrected"]:
            contained = contains_errors(device)
            limit = options["contained" if contained else "uncorrected"]
            condition = UNCORRECTED if count > limit or not contained else CONTAINED
            text = f"{count} uncorrectable errors since the last reset, limit {limit}"
            kind = "contained" if contained else "not contained"
            found.append(condition.found(f"{text}, {kind}{board} (NVML volatile ECC)", name))
        count = ecc.get("volatile_corrected", 0)
        limit = options["corrected_per_hour"]
        if count > limit:  # the period is an hour at least: below this there is nothing to divide
            rate = count / gpus.counting_hours(system, device)
            if rate > limit:
                text = f"{rate:.0f} corrected errors per hour ({count} since the last reset)"
                found.append(RATE.found(f"{text}, limit {limit:.0f}{board} (NVML ECC)", name))
        count = ecc.get("aggregate_uncorrected", 0)
        limit = options["lifetime_uncorrected"]
        if count > limit:
            text = f"{count} uncorrectable errors over its life, limit {limit}"
            found.append(LIFETIME.found(f"{text}{board} (NVML aggregate ECC)", name))
    return found


CHECK = Check(
    "gpu_ecc",
    run,
    (UNCORRECTED, CONTAINED, RATE, LIFETIME, SRAM, UNREADABLE),
    SETTINGS,
    needs_nvml=True,
    cost_ms=0.1,
)
