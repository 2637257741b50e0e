"""NVSwitch systems, for the family nvlink: the fabric state of every GPU, the fabric manager."""

from __future__ import annotations

from health.check import Condition
from health.finding import Finding
from health.node import proctable, sysfs
from health.node.gpu_snapshot import Device, Fabric
from health.node.system import System
from health.nvidia import gpus

NOT_READY = Condition(
    "fabric-not-ready",
    "FAIL",
    "node",
    "restart-fabric-manager",
    "the GPU has not joined the fabric (not started, in progress): CUDA does not start",
)
FAILED = Condition(
    "fabric-failed",
    "FAIL",
    "node",
    "restart-fabric-manager",
    "joining the fabric ended with an error",
)
UNHEALTHY = Condition(
    "fabric-unhealthy",
    "FAIL",
    "node",
    "reset-gpu",
    "the fabric reports a broken route, less bandwidth, or an access time-out for the GPU",
)
MISCONFIGURED = Condition(
    "fabric-misconfigured",
    "FAIL",
    "node",
    "service",
    "the fabric reports a wrong set-up: place, firmware, partition or number of links",
)
MANAGER = Condition(
    "fabric-manager-down",
    "FAIL",
    "node",
    "restart-fabric-manager",
    "the node has NVSwitches and nv-fabricmanager does not run",
)
CONDITIONS = (NOT_READY, FAILED, UNHEALTHY, MISCONFIGURED, MANAGER)

_SWITCHES = "/proc/driver/nvidia-nvswitch/devices"
_PID_FILE = "/run/nvidia-fabricmanager/nv-fabricmanager.pid"
_COMM = "nv-fabricmanage"  # as the kernel cuts it, at 15 characters

# Two-bit fields of the health mask whose value 1 is "true" (nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*).
_BAD = {
    0: "degraded bandwidth",
    2: "route recovery",
    4: "route unhealthy",
    6: "access timeout recovery",
}
_SETUP_SHIFT, _SETUP_MASK = 8, 0xF  # 0 not supported, 1 none, else what is wrong
_SETUP = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid GPU state",
}


def soldered(device: Device) -> bool:
    """True if the board's links are part of the system, not bridges between PCIe boards."""
    state = device.get("fabric", {}).get("state", "not_supported")
    return state != "not_supported" or "SXM" in device.get("name", "")


def run(system: System, devices: list[Device]) -> list[Finding]:
    """The fabric's state of every GPU, then its manager."""
    found = []
    for device in devices:
        fabric = device.get("fabric", {})
        if fabric.get("state", "not_supported") != "not_supported":
            found += _state(device, fabric)
    return found + (_manager(system) if devices else [])


def _state(device: Device, fabric: Fabric) -> list[Finding]:
    name, source = gpus.name(device), f"{gpus.identity(device)} (NVML fabric info)"
    state, status = fabric["state"], fabric.get("status", "NVML_SUCCESS")
    if state != "completed":
        return [NOT_READY.found(f"fabric state {state}, expected completed{source}", name)]
    if status != "NVML_SUCCESS":
        return [FAILED.found(f"fabric status {status}, expected NVML_SUCCESS{source}", name)]
    mask = fabric.get("health", 0)
    found = []
    bad = [text for shift, text in _BAD.items() if mask >> shift & 3 == 1]
    if bad:
        text = f"fabric health 0x{mask:x}: {', '.join(bad)}, expected none"
        found.append(UNHEALTHY.found(f"{text}{source}", name))
    setup = mask >> _SETUP_SHIFT & _SETUP_MASK
    if setup > 1:
        text = f"fabric health 0x{mask:x}: {_SETUP.get(setup, f'set-up error {setup}')}"
        found.append(MISCONFIGURED.found(f"{text}, expected none{source}", name))
    return found


def _manager(system: System) -> list[Finding]:
    switches = sysfs.names(system, _SWITCHES)
    if not switches or _runs(system):
        return []
    text = f"{len(switches)} NVSwitches ({_SWITCHES}) and no process {_COMM}r"
    return [MANAGER.found(f"{text}: systemctl status nvidia-fabricmanager")]


def _runs(system: System) -> bool:
    """Look at its pid file; where that leads nowhere (a container) at all processes."""
    pid = sysfs.text(system, _PID_FILE)
    if pid.isdigit() and sysfs.text(system, f"/proc/{pid}/comm") == _COMM:
        return True
    return proctable.runs(system, _COMM)
