"""The driver's answers to NVML: failed starts, silence, and GPUs it lost."""

from __future__ import annotations

import re

from health.check import Check, Condition
from health.children.child import OTHERS
from health.children.kernel_waits import waits_for_server, waits_for_user
from health.finding import Finding
from health.node.gpu_snapshot import Device, GpuSnapshot, Lost
from health.node.system import System
from health.nvidia import gpus

HUNG = Condition(
    "nvml-hung",
    "FAIL",
    "node",
    "reboot",
    "NVML did not answer within its deadline, and the process that queried it could not be killed "
    "(state D); class user, action none if it waits, or may, for a file server or a user's process",
)
# Not reboot: most often a driver that starts every GPU anew. It passes once NVML is in time.
SLOW = Condition(
    "nvml-slow",
    "FAIL",
    "node",
    "none",
    "NVML did not answer within its deadline; the process that queried it could be killed",
)
# Not reboot: slurmd may start, and sweep, before the module is loaded. Once it is, the checks tell.
NOT_LOADED = Condition(
    "driver-not-loaded", "FAIL", "node", "none", "the kernel module nvidia is not loaded"
)
MISMATCH = Condition(
    "driver-mismatch",
    "FAIL",
    "node",
    "reboot",
    "the driver's library and the loaded kernel module have different versions",
)
UNUSABLE = Condition(
    "nvml-unusable",
    "ERROR",
    "tool",
    "none",
    "there is no NVML library or no pynvml for the gate, or its collector died; FAIL if it did "
    "not get as far as NVML",
)
FAILED = Condition("nvml-failed", "FAIL", "node", "reboot", "NVML's start or count failed")
GONE = Condition(
    "gpu-gone", "FAIL", "node", "reboot", "NVML counts the GPU but cannot reach it any more"
)
RESET = Condition(
    "gpu-reset-required", "FAIL", "node", "reset-gpu", "NVML: the GPU requires a reset"
)
CABLE = Condition(
    "gpu-power-cable", "FAIL", "node", "service", "NVML: the GPU's power cables are not attached"
)
INFOROM = Condition(
    "inforom-corrupt", "WARN", "node", "service", "the board's infoROM is corrupted"
)

_BEFORE = ("fork", "slurm.conf", "import")
_TOOL = ("no-library", "no-pynvml", "died-", "too-many-answers")
_OF_DEVICE = {
    "NVML_ERROR_RESET_REQUIRED": RESET,
    "NVML_ERROR_INSUFFICIENT_POWER": CABLE,
    "NVML_ERROR_CORRUPTED_INFOROM": INFOROM,
}


def run(system: System) -> list[Finding]:
    """Findings about the whole of NVML, then about single GPUs."""
    snapshot = system.nvml()
    found = _whole(snapshot)
    if found and (not gpus.wanted(system) or gpus.of_others(system)):
        return []  # nothing here for NVML to manage
    for lost in _named(system, snapshot):
        error = lost.get("error", "")
        name = gpus.name({"index": lost["index"]} if "index" in lost else {})
        where = f" [{lost['pci']}]" if lost.get("pci") else ""
        condition = _OF_DEVICE.get(error, GONE)
        found.append(condition.found(f"NVML gives no access: {error}{where}", name))
    for device in snapshot.get("devices", []):
        found += _of_device(device)
    return found


def _named(system: System, snapshot: GpuSnapshot) -> list[Lost]:
    """Return the lost GPUs; one without an address gets the one that NVML did not report.

    NVML numbers GPUs in the order of their addresses. Nothing is guessed unless as many addresses
    are left over on the PCI bus as lost GPUs lack one.
    """
    lost = snapshot.get("lost", [])
    if snapshot.get("stage") != "done" or all(gpu.get("pci") for gpu in lost):
        return lost
    try:
        there = gpus.pci(system)
    except OSError:
        return lost
    known = {gpu.get("pci") for gpu in (*snapshot.get("devices", []), *lost)}
    left = [address for address in there if address not in known]
    unnamed = [gpu for gpu in lost if not gpu.get("pci")]
    if len(left) != len(unnamed):
        return lost
    named = dict(zip((gpu.get("index") for gpu in unnamed), left, strict=True))
    return [gpu if gpu.get("pci") else gpu | {"pci": named[gpu.get("index")]} for gpu in lost]


def _whole(snapshot: GpuSnapshot) -> list[Finding]:
    error, stage = snapshot.get("error", ""), snapshot.get("stage", "")
    if snapshot.get("hung"):
        gpu = re.match(r"gpu\d+", stage)
        waited = snapshot.get("waited")
        within = f"{waited:.1f} s" if waited else "its deadline"
        text = f"NVML did not answer within {within}; it was at: {stage}"
        if stage.startswith(_BEFORE):  # a file system's fault, and no driver was asked
            return [UNUSABLE.found(f"{text}; {_haste(stage)}", status="FAIL")]
        if not snapshot.get("killed"):
            condition = HUNG._replace(cls="user", action="none") if _behind(stage) else HUNG
            return [condition.found(text, gpu[0] if gpu else "")]
        return [SLOW.found(f"{text}; {_haste(stage)}", gpu[0] if gpu else "")]
    if error == "NVML_ERROR_DRIVER_NOT_LOADED":
        return [NOT_LOADED.found(f"NVML {stage}: {error}")]
    if error == "NVML_ERROR_LIB_RM_VERSION_MISMATCH":
        text = "the driver was updated and not reloaded; reboot, or install one version"
        return [MISMATCH.found(f"NVML {stage}: {error}: {text}")]
    if error.startswith(_TOOL):
        return [UNUSABLE.found(f"NVML {stage}: {error}: {_cure(error)}")]
    if error:
        return [FAILED.found(f"NVML {stage}: {error}")]
    if stage != "done":
        return [UNUSABLE.found(f"the NVML collection ended early, at: {stage}")]
    return []


def _behind(stage: str) -> bool:
    """Return whether it may hang because of somebody else, and not in the driver."""
    channel = re.search(r"state D in (\S+?)\)?(?: |$)", stage)
    # It is a process of the gate's: no FUSE daemon of a user's can be what it asks.
    name = channel[1] if channel else ""
    return OTHERS in stage or (waits_for_server(name, "") and not waits_for_user(name))


def _haste(stage: str) -> str:
    if stage.startswith(_BEFORE):
        return "no driver was asked yet; is the file system of slurm.conf or of Python slow?"
    return (
        "is persistence mode off? nvidia-persistenced avoids the slow start; or raise [gate] "
        "nvml_deadline"
    )


def _cure(error: str) -> str:
    if error == "no-pynvml":
        return "install nvidia-ml-py for the gate's Python"
    if error == "no-library":
        return "libnvidia-ml.so.1 is not where the loader looks; install the driver's libraries"
    return "the collecting process ended before it had reported everything"


def _of_device(device: Device) -> list[Finding]:
    """One finding per error that means the device as a whole."""
    found: dict[str, Finding] = {}
    for query, error in device.get("errors", {}).items():
        if error in gpus.WHOLE_DEVICE:
            condition = _OF_DEVICE.get(error, GONE)
            text = f"NVML {query}: {error}{gpus.identity(device)}"
            found.setdefault(condition.check, condition.found(text, gpus.name(device)))
    return list(found.values())


CHECK = Check(
    "nvml",
    run,
    (HUNG, SLOW, NOT_LOADED, MISMATCH, UNUSABLE, FAILED, GONE, RESET, CABLE, INFOROM),
    {},
    needs_nvml=True,
    cost_ms=0.1,
)
