"""The GPUs' PCIe links: width, generation, replays; also the links above them in the tree.

An idle GPU lowers its link's generation to save power, never its width: the current generation
is judged only while the GPU works. A link's width is compared with the least of what its two
ends can; where all GPUs of a model have the same smaller one, the slots are likely wired so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node.gpu_snapshot import Device
from health.node.sysfs import link, number
from health.node.system import System
from health.nvidia import gpus

WIDTH = Condition(
    "pcie-width", "FAIL", "node", "reboot", "a GPU's link has fewer lanes than it should have"
)
WIDTH_ALL = Condition(
    "pcie-width-all",
    "WARN",
    "node",
    "none",
    "the same, but most GPUs of the model in this node have that width, and no width is set or "
    "recorded",
)
UPSTREAM = Condition(
    "pcie-upstream-width",
    "FAIL",
    "node",
    "reboot",
    "a link between a PCIe switch and the host has fewer lanes than most others of this node (a "
    "WARN where no other shows that it could have more)",
)
GENERATION = Condition(
    "pcie-generation",
    "FAIL",
    "node",
    "reboot",
    "GPU and slot together reach a lower generation than set or recorded",
)
UNEVEN = Condition(
    "pcie-uneven",
    "WARN",
    "node",
    "reboot",
    "GPU and slot together reach less than most GPUs of the model in this node",
)
SLOW = Condition(
    "pcie-generation-busy",
    "WARN",
    "node",
    "none",
    "a busy GPU runs at a lower generation than it supports",
)
GONE = Condition(
    "pcie-gone", "FAIL", "node", "reboot", "the GPU's configuration space reads as all ones"
)
REPLAYS = Condition(
    "pcie-replays", "WARN", "node", "none", "more replays per minute than `replays_per_minute`"
)
UNREADABLE = Condition(
    "pcie-unreadable", "ERROR", "node", "reboot", "NVML did not report the link's state"
)

SETTINGS = {
    "width": Setting(
        0,
        "lanes of every GPU's link; 0: the recorded width, else the most that GPU and slot support",
    ),
    "generation": Setting(0, "PCIe generation that GPU and slot must reach; 0: the recorded one"),
    "replays_per_minute": Setting(
        8.0, "on average since the driver was loaded; NVIDIA's limit in DCGM"
    ),
}

_ALL_ONES = (63, 255)  # what a width reads when the device does not answer


def run(system: System) -> list[Finding]:
    """Findings about every GPU's link, then about the links above."""
    options = system.options("gpu_pcie")
    devices = gpus.devices(system)
    found = []
    for device in devices:
        name, board = gpus.name(device), gpus.identity(device)
        found += gpus.unreadable(UNREADABLE, device, "pcie", board=board)
        if _sysfs(system, device.get("pci", ""), "current_link_width") in _ALL_ONES:
            text = f"its configuration space reads as all ones{board} (current_link_width)"
            found.append(GONE.found(text, name))
            continue
        found += _width(system, device, devices, options["width"])
        found += _generation(system, device, devices, options["generation"])
        found += _replays(system, device, options["replays_per_minute"])
    return found + _upstream(system, devices)


def _width(system: System, device: Device, devices: list[Device], setting: int) -> list[Finding]:
    pcie, model = device.get("pcie", {}), device.get("name", "")
    now, most = pcie.get("width", 0), pcie.get("max_width", 0)
    source = "NVML"
    if not now:
        now = _sysfs(system, device.get("pci", ""), "current_link_width")
        most = _sysfs(system, device.get("pci", ""), "max_link_width")
        source = "sysfs"
    wanted, why = _wanted(system, model, "width", setting)
    limit = wanted or most
    if not now or now >= limit:
        return []
    same = [d.get("pcie", {}).get("width", 0) for d in devices if d.get("name", "") == model]
    condition = WIDTH
    if not wanted and gpus.majority([width for width in same if width]) == now:
        condition = WIDTH_ALL
    text = f"PCIe width x{now}, expected x{limit} ({why or 'the most of GPU and slot'})"
    return [condition.found(f"{text}{gpus.identity(device)} ({source})", gpus.name(device))]


def _wanted(system: System, model: str, key: str, setting: int) -> tuple[int, str]:
    """The value that the site sets or the fleet recorded (0: neither), and its source."""
    if setting:
        return setting, f"[health.gpu_pcie] {key}"
    recorded = gpus.recorded(system, "pcie", model)
    value = recorded.get(key) if isinstance(recorded, Mapping) else None
    return (value, f"fleet pcie {key}") if isinstance(value, int) else (0, "")


def _generation(
    system: System, device: Device, devices: list[Device], setting: int
) -> list[Finding]:
    pcie, model = device.get("pcie", {}), device.get("name", "")
    now, most = pcie.get("generation", 0), pcie.get("max_generation", 0)
    name, board = gpus.name(device), gpus.identity(device)
    wanted, why = _wanted(system, model, "generation", setting)
    if not most:
        return []
    if most < wanted:
        text = f"PCIe generation at most {most}, expected {wanted} ({why})"
        return [GENERATION.found(f"{text}{board} (NVML)", name)]
    found = []
    for key, value in (("max_generation", most), ("max_width", pcie.get("max_width", 0))):
        same: list[Any] = [
            d.get("pcie", {}).get(key) for d in devices if d.get("name", "") == model
        ]
        usual = gpus.majority([value for value in same if value])
        if value and not wanted and usual is not None and value < usual:
            text = f"PCIe {key.replace('_', ' ')} {value}, most {model} of this node have {usual}"
            found.append(UNEVEN.found(f"{text}{board} (NVML)", name))
    if now and now < most and not gpus.idle(device) and not device.get("throttle", 1) & 1:
        text = f"PCIe generation {now} on a busy GPU, expected {most}"
        found.append(SLOW.found(f"{text}{board} (NVML)", name))
    return found


def _replays(system: System, device: Device, limit: float) -> list[Finding]:
    count = device.get("pcie", {}).get("replays", 0)
    if count <= limit * 60:  # the period is an hour at least
        return []
    rate = count / (60 * gpus.counting_hours(system, device))
    if rate <= limit:
        return []
    text = f"{rate:.1f} PCIe replays per minute ({count} in all), limit {limit:g}"
    return [REPLAYS.found(f"{text}{gpus.identity(device)} (NVML)", gpus.name(device))]


def _upstream(system: System, devices: list[Device]) -> list[Finding]:
    """The links of switches above GPUs: current lanes against what both ends can have."""
    links: dict[str, tuple[int, int, list[str]]] = {}
    for device in devices:
        above = _above(system, device.get("pci", ""))
        # GPU - downstream port = upstream port - next port = …: every second pair is one switch.
        for lower, upper in zip(above[1::2], above[2::2], strict=False):
            if lower not in links:
                ends = (
                    _sysfs(system, lower, "max_link_width"),
                    _sysfs(system, upper, "max_link_width"),
                )
                links[lower] = (_sysfs(system, lower, "current_link_width"), min(ends), [])
            links[lower][2].append(gpus.name(device))
    usual = gpus.majority([now for now, _, _ in links.values()])
    found = []
    for port, (now, most, below) in links.items():
        if 0 < now < most and now not in _ALL_ONES:
            text = f"PCIe width x{now} above {' '.join(below)}, both ends can have x{most}"
            proven = usual is not None and now < usual
            found.append(
                UPSTREAM.found(f"{text} (sysfs {port})", port, status="FAIL" if proven else "WARN")
            )
    return found


def _above(system: System, address: str) -> list[str]:
    """PCI addresses of the bridges above a device, the nearest first."""
    path = link(system, f"{gpus.PCI}/{address}")
    parts = [part for part in path.split("/") if part.count(":") == 2]
    return parts[-2::-1]


def _sysfs(system: System, address: str, key: str) -> int:
    """A number of a PCI device; 0 where there is none."""
    return number(system, f"{gpus.PCI}/{address}/{key}") or 0


CHECK = Check(
    "gpu_pcie",
    run,
    (WIDTH, WIDTH_ALL, UPSTREAM, GENERATION, UNEVEN, SLOW, GONE, REPLAYS, UNREADABLE),
    SETTINGS,
    needs_nvml=True,
    cost_ms=1.5,
)
