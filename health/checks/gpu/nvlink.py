"""NVLink: links that are down, error counters, and the fabric of systems with switches.

How many links are right comes from the site, the fleet, or the node's other GPUs of the model.
Boards whose links are soldered (SXM, anything with a fabric) must all have the same; on PCIe
boards bridges may join only some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.nvidia import fabric, gpus
from robust_slurm.text import counted

DOWN = Condition(
    "nvlink-down", "FAIL", "node", "reboot", "a GPU has fewer active links than it should have"
)
FEWER = Condition(
    "nvlink-fewer",
    "WARN",
    "node",
    "none",
    "a GPU on a PCIe board has fewer active links than most of the model in this node",
)
ALL_DOWN = Condition(
    "nvlink-all-down",
    "FAIL",
    "node",
    "restart-fabric-manager",
    "no GPU of a system with soldered links has an active link",
)
FATAL = Condition(
    "nvlink-fatal", "FAIL", "node", "reset-gpu", "a link failed to recover (NVLink 5)"
)
REPLAYS = Condition(
    "nvlink-replays",
    "FAIL",
    "node",
    "reset-gpu",
    "more replays, recoveries or bad packets per hour than `retries_per_hour`",
)
CRC = Condition(
    "nvlink-crc", "FAIL", "node", "reset-gpu", "more CRC errors per second than `crc_per_second`"
)
ERRORS = Condition(
    "nvlink-errors", "WARN", "node", "none", "more errors since the last reset than `errors`"
)
UNREADABLE = Condition(
    "nvlink-unreadable", "ERROR", "node", "reboot", "NVML did not report links or fabric state"
)

SETTINGS = {
    "links": Setting(
        -1, "active links of every GPU; -1: the recorded number, else that of the other GPUs"
    ),
    "retries_per_hour": Setting(
        60.0, "replays, recoveries or bad packets of a GPU, on average since the last reset"
    ),
    "crc_per_second": Setting(
        100.0, "CRC errors of a GPU, on average since the last reset; NVIDIA's limit in DCGM"
    ),
    "errors": Setting(100, "errors of any kind of a GPU since the last reset"),
}

_RETRIES = ("replay", "recovery", "bad")


def run(system: System) -> list[Finding]:
    """Findings about every GPU's links, then about the fabric."""
    options = system.options("nvlink")
    devices = gpus.devices(system)
    found = []
    for device in devices:
        board = gpus.identity(device)
        found += gpus.unreadable(UNREADABLE, device, "nvlinks", "fabric", board=board)
        found += _errors(system, device, options)
    for model in dict.fromkeys(device.get("name", "") for device in devices):
        same = [d for d in devices if d.get("name", "") == model and _comparable(d)]
        found += _links(system, model, same, options["links"])
    return found + fabric.run(system, devices)


def active(device: Device) -> int:
    """The number of the GPU's links that are up."""
    return sum(bool(link.get("active")) for link in device.get("nvlinks", []))


def _comparable(device: Device) -> bool:
    """Links that the driver gave up are missing like those of a board without NVLink: that is 0.

    With MIG a GPU uses no NVLink; what could not be read was said already.
    """
    return not device.get("mig") and not gpus.refused(device, "nvlinks")


def _links(system: System, model: str, same: list[Device], setting: int) -> list[Finding]:
    """The active links of the node's GPUs of one model."""
    counts = [active(device) for device in same]
    recorded = gpus.recorded(system, "nvlinks", model)
    soldered = any(fabric.soldered(device) for device in same)
    condition = DOWN
    if setting >= 0:
        wanted, source = setting, "[health.nvlink] links"
    elif isinstance(recorded, int):
        wanted, source = recorded, "fleet nvlinks"
    elif not any(counts):
        links = max((len(device.get("nvlinks", [])) for device in same), default=0)
        if soldered and links and len(same) > 1:
            text = f"0 of {links} links active on each of {len(same)} {model}"
            return [ALL_DOWN.found(f"{text} (NVML)")]
        return []
    elif soldered:
        wanted, source = max(counts), f"another {model} of this node"
    else:
        wanted, source = gpus.majority(counts) or 0, f"most {model} of this node"
        condition = FEWER
    return [
        condition.found(
            f"{count} NVLinks active, expected {wanted} ({source}){_which(device)}"
            f"{gpus.identity(device)} (NVML)",
            gpus.name(device),
        )
        for device, count in zip(same, counts, strict=True)
        if count < wanted
    ]


def _which(device: Device) -> str:
    down = [str(link["link"]) for link in device.get("nvlinks", []) if not link.get("active")]
    return f"; down: {','.join(down)}" if down else ""


def _errors(system: System, device: Device, options: Mapping[str, Any]) -> list[Finding]:
    totals: dict[str, int] = {}
    worst: dict[str, tuple[int, int]] = {}  # kind: errors of the worst link, its number
    for link in device.get("nvlinks", []):
        for kind, count in link.get("errors", {}).items():
            totals[kind] = totals.get(kind, 0) + count
            worst[kind] = max(worst.get(kind, (0, 0)), (count, link.get("link", 0)))
    if not any(totals.values()):
        return []
    name, board = gpus.name(device), gpus.identity(device)
    each = ", ".join(
        f"{kind} {count} (link {worst[kind][1]}: {worst[kind][0]})"
        for kind, count in totals.items()
        if count
    )
    source = f": {each} since the last reset{board} (NVML)"
    hours = gpus.counting_hours(system, device)
    retries = sum(totals.get(kind, 0) for kind in _RETRIES) / hours
    crc = sum(count for kind, count in totals.items() if kind.startswith("crc")) / hours / 3600
    found = []
    if totals.get("fatal"):
        found.append(FATAL.found(f"{totals['fatal']} failed recoveries, limit 0{source}", name))
    if retries > options["retries_per_hour"]:
        text = f"{retries:.0f} retries per hour, limit {options['retries_per_hour']:.0f}"
        found.append(REPLAYS.found(f"{text}{source}", name))
    if crc > options["crc_per_second"]:
        text = f"{crc:.0f} CRC errors per second, limit {options['crc_per_second']:.0f}"
        found.append(CRC.found(f"{text}{source}", name))
    if not found and sum(totals.values()) > options["errors"]:
        text = f"{counted(sum(totals.values()), 'error')}, limit {options['errors']}"
        found.append(ERRORS.found(f"{text}{source}", name))
    return found


CHECK = Check(
    "nvlink",
    run,
    (
        DOWN,
        FEWER,
        ALL_DOWN,
        FATAL,
        REPLAYS,
        CRC,
        ERRORS,
        UNREADABLE,
        *fabric.CONDITIONS,
    ),
    SETTINGS,
    needs_nvml=True,
    cost_ms=0.3,
)
