"""The common parts of the GPU checks: GPUs present and expected, names, refused queries.

The fleet's recorded values (``System.fleet``) that GPU checks read; a key may be missing:
``driver``: allowed versions; by the model's name: ``vbios``: allowed versions, ``max_clocks``:
{"sm": MHz, "memory": MHz}, ``power_limits``: W in force, ``nvlinks``: active links, ``pcie``:
{"generation": n, "width": n}.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from health.check import Condition
from health.finding import Finding
from health.node import slurmconf, sysfs
from health.node.gpu_snapshot import Device
from health.node.sysfs import link
from health.node.system import System

PCI = "/sys/bus/pci/devices"
DRIVER = "nvidia"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")  # VGA controller, 3D controller
# Accelerators of other vendors: AMD, Habana. Not 0x0300: a processor's own graphics must not stand
# in for the only GPU of a node.
_OTHERS = ("0x1002", "0x1da3")
_OTHER_CLASSES = ("0x0302", "0x0380", "0x1200")  # 3D, other display, processing accelerator

# The query does not exist for this board or this driver: nothing is wrong.
HARMLESS = frozenset(
    f"NVML_ERROR_{name}"
    for name in (
        "NOT_SUPPORTED",
        "FUNCTION_NOT_FOUND",
        "ARGUMENT_VERSION_MISMATCH",
        "INVALID_ARGUMENT",  # a field number that an older driver does not know
        "VGPU_ECC_NOT_SUPPORTED",
        "DEPRECATED",
        "NO_DATA",
        "NOT_FOUND",
    )
)
# The device as a whole has failed, whatever the query was: the family nvml reports it, once.
WHOLE_DEVICE = frozenset(
    f"NVML_ERROR_{name}"
    for name in (
        "GPU_IS_LOST",
        "GPU_NOT_FOUND",
        "RESET_REQUIRED",
        "INSUFFICIENT_POWER",
        "IRQ_ISSUE",
        "CORRUPTED_INFOROM",
    )
)


def configured(system: System) -> int | None:
    """The number of GPUs that the node should have, by the site, else by Slurm; None: unknown."""
    expected = int(system.options("gpu_count")["expected"])
    return expected if expected >= 0 else slurmconf.expected_gpus(system)


def wanted(system: System) -> bool:
    """True if NVML is to be asked at all.

    True if GPUs are configured; if their number is unknown, if the PCI bus has one; if none is
    configured, if NVIDIA's driver has one.
    """
    count = configured(system)
    if count:
        return True
    try:
        there = pci(system)
    except FileNotFoundError:
        return False  # no PCI bus
    except OSError:
        return count is None
    return bool(there) and (count is None or any(driver(system, gpu) == DRIVER for gpu in there))


def pci(system: System) -> list[str]:
    """PCI addresses of the GPUs that are the driver's, "0000:3b:00.0", sorted. Raises OSError.

    Left out: virtual functions, and what another driver has (vfio-pci: given to a virtual
    machine; nouveau: a display). A GPU whose start failed has no driver and is in the list.
    """
    there = _on_bus(system, (_NVIDIA,), _GPU_CLASSES)
    return [address for address in there if driver(system, address) in ("", DRIVER)]


def _on_bus(system: System, vendors: Collection[str], classes: Collection[str]) -> list[str]:
    """PCI addresses of such devices, without virtual functions. Raises OSError."""
    out = []
    for address in system.names(PCI):
        place = f"{PCI}/{address}"
        try:
            if system.read(f"{place}/vendor").strip() not in vendors:
                continue
            fits = system.read(f"{place}/class").strip()[:6] in classes
        except FileNotFoundError:
            continue  # taken out while we looked
        if fits and not link(system, f"{place}/physfn"):
            out.append(address)
    return out


def of_others(system: System) -> bool:
    """True if the GPUs that Slurm counts are another vendor's.

    No GPU of NVIDIA's is on the bus then, and as many others as Slurm has are; False where the
    site says itself how many there must be.
    """
    count = configured(system)
    if not count or int(system.options("gpu_count")["expected"]) >= 0:
        return False
    try:
        return not pci(system) and len(_on_bus(system, _OTHERS, _OTHER_CLASSES)) >= count
    except OSError:
        return False


def driver(system: System, address: str) -> str:
    """Name of the kernel driver that has a PCI device; empty: none."""
    return link(system, f"{PCI}/{address}/driver").rpartition("/")[2]


def devices(system: System) -> list[Device]:
    """The GPUs that NVML reported; empty if it reported none (the family nvml says why)."""
    return system.nvml().get("devices", [])


def name(device: Device) -> str:
    """ "gpu3"."""
    return f"gpu{device['index']}" if "index" in device else device.get("pci", "gpu")


def identity(device: Device) -> str:
    """The words by which a person finds the board: " [0000:3b:00.0, serial 1234]"."""
    serial = device.get("serial", "")
    parts = [device.get("pci", ""), f"serial {serial}" if serial else ""]
    text = ", ".join(part for part in parts if part)
    return f" [{text}]" if text else ""


def refused(device: Device, *queries: str) -> str:
    """The first unexpected failure of these queries, as "ecc: NVML_ERROR_UNKNOWN"; "" if none.

    A query is "ecc" or "ecc.enabled"; "ecc" stands for its parts as well.
    """
    for query, error in device.get("errors", {}).items():
        if error in HARMLESS or error in WHOLE_DEVICE:
            continue
        if any(query == wanted or query.startswith(f"{wanted}.") for wanted in queries):
            return f"{query}: {error}"
    return ""


def unreadable(
    condition: Condition, device: Device, *queries: str, board: str = ""
) -> list[Finding]:
    """The finding on the first unexpected failure of these queries; none if there is none."""
    problem = refused(device, *queries)
    return [condition.found(f"NVML {problem}{board}", name(device))] if problem else []


def idle(device: Device) -> bool:
    """True if nothing runs on the GPU: no process, or NVML's word where it lists none (MIG)."""
    if "processes" in device:
        return not device["processes"]
    return bool(device.get("throttle", 0) & 1)  # nvmlClocksEventReasonGpuIdle


def counting_hours(system: System, device: Device) -> float:
    """Hours since the counters of a device began: boot, driver load or reset; at least one.

    At least one, so that a few errors in the first minutes are not taken for a rate.
    """
    seconds = system.uptime()
    try:
        events = system.history()
    except OSError:
        events = []  # then over a longer time than may be right: fewer findings
    mine = {"", name(device), device.get("pci", ""), device.get("uuid", "")}
    for event in events:
        ours = event.kind == "driver" or (
            event.kind == "reset" and str(event.data.get("gpu", "")) in mine
        )
        if ours and event.boot == system.boot_id():
            seconds = min(seconds, max(0.0, system.now() - event.time))
    return max(1.0, seconds / 3600)


def recorded(system: System, key: str, model: str | None = None) -> Any:
    """The fleet's value, of one model where ``model`` is given; None if nothing was recorded."""
    value = sysfs.fleet(system).get(key)
    if model is None:
        return value
    return value.get(model) if isinstance(value, Mapping) else None


def majority(values: list[int]) -> int | None:
    """The value that more than half of them have; None: there is none, or only one to compare."""
    if len(values) < 2:
        return None
    best = max(set(values), key=values.count)
    return best if values.count(best) * 2 > len(values) else None
