"""The number of GPUs: Slurm's configuration against the PCI bus against NVML.

The number that is right comes from Slurm (or the site), never from what is visible: a GPU that
fell off the bus is not visible. Where the three differ, the difference names the device.
"""

from __future__ import annotations

import re

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node import slurmconf, sysfs
from health.node.system import System
from health.nvidia import gpus
from robust_slurm.text import counted

UNKNOWN = Condition(
    "gpu-count-unknown",
    "ERROR",
    "tool",
    "none",
    "neither Slurm's files nor `expected` give the number of GPUs (WARN if no NVIDIA device is on "
    "the PCI bus, unless a driver or, in the prolog, the job implies one)",
)
UNREADABLE = Condition(
    "gpu-pci-unreadable", "ERROR", "tool", "none", "/sys/bus/pci/devices cannot be read"
)
MISSING = Condition(
    "gpu-missing", "FAIL", "node", "reboot", "fewer GPUs on the PCI bus than configured"
)
LOST = Condition(
    "gpu-lost", "FAIL", "node", "reboot", "a GPU on the PCI bus that NVML does not show"
)
UNCONFIGURED = Condition(
    "gpu-unconfigured", "WARN", "node", "none", "more GPUs on the PCI bus than configured"
)
# Not reboot: nvidia-persistenced or udev may make it only after slurmd has started.
FILE = Condition(
    "gpu-device-file", "FAIL", "node", "none", "a device file that gres.conf names is missing"
)
SLICES = Condition(
    "gpu-count-slices",
    "WARN",
    "tool",
    "none",
    "Slurm counts MIG slices and gres.conf names no device files: set `expected`",
)

OTHERS = Condition(
    "gpu-other-vendor",
    "WARN",
    "tool",
    "none",
    "Slurm's GPUs are another vendor's: they are not checked; `expected = 0` silences this",
)

SETTINGS = {
    "expected": Setting(
        -1, "number of GPUs that this node must have; -1: the number in Slurm's files", "GPUs"
    ),
}

_DRIVER = "/proc/driver/nvidia/version"
_EXCLUDED = re.compile(r"GPU (?:Excluded|Blacklisted):\s*Yes", re.IGNORECASE)


def run(system: System) -> list[Finding]:
    """The three counts compared; a node without GPUs passes without NVML."""
    conf = slurmconf.load(system)
    site = int(system.options("gpu_count")["expected"])
    wanted = site if site >= 0 else slurmconf.expected_gpus(system)
    source = "[health.gpu_count] expected" if site >= 0 else conf.path
    try:
        pci = gpus.pci(system)
    except FileNotFoundError as err:
        if not wanted:
            return _unknown(system, conf, []) if wanted is None else []  # a node without a PCI bus
        return [_unreadable(err)]
    except OSError as err:
        return [_unreadable(err)]
    found = []
    if wanted is None:
        found += _unknown(system, conf, pci)
    elif len(pci) < wanted and gpus.of_others(system):
        text = f"{counted(wanted, 'GPU')} configured ({source}), which are not NVIDIA's: no check "
        text += "supports them"
        return [OTHERS.found(f"{text}; set [health.gpu_count] expected = 0")]
    elif len(pci) < wanted:
        text = f"{counted(len(pci), 'GPU')} on the PCI bus, {wanted} configured ({source})"
        found.append(MISSING.found(f"{text}{_gone(system, pci)}"))
    elif len(pci) > wanted:
        text = f"{counted(len(pci), 'GPU')} on the PCI bus, {wanted} configured ({source})"
        found.append(UNCONFIGURED.found(text))
    if pci and wanted != 0:
        found += _lost(system, pci)
    if wanted:
        found += _files(system, conf)
    return found


def _unreadable(err: OSError) -> Finding:
    return UNREADABLE.found(f"{gpus.PCI}: {err.strerror}")


def _unknown(system: System, conf: slurmconf.Conf, pci: list[str]) -> list[Finding]:
    if conf.node and any(map(slurmconf.is_slice, conf.node.gpus)):
        return [
            SLICES.found(
                f"Gres={conf.node.values.get('gres', '')[:80]} counts slices ({conf.path})"
            )
        ]
    if conf.path:
        why = "; ".join((f"no NodeName line in {conf.path} names this node", *conf.problems))
    else:
        why = "; ".join(conf.problems)
    text = f"{len(pci)} NVIDIA GPUs on the PCI bus and nothing to compare with: {why[:300]}"
    cure = "; set [health.gpu_count] expected"
    gone = not conf.path and system.context.where == "prolog" and _had_gpus(system)
    return [UNKNOWN.found(f"{text}{cure}", status="ERROR" if pci or gone else "WARN")]


def _had_gpus(system: System) -> bool:
    """True if the node should have GPUs but the bus shows none: by a driver, or Slurm's word."""
    return bool(system.context.env.get("SLURM_JOB_GPUS") or sysfs.kind(system, _DRIVER))


def _gone(system: System, pci: list[str]) -> str:
    """The part of the evidence that names NVML's GPUs gone from the bus; "" if there are none."""
    known = [device.get("pci", "") for device in gpus.devices(system)]
    gone = [address for address in known if address and address not in pci]
    return f"; gone from it: {' '.join(gone)}" if gone else ""


def _lost(system: System, pci: list[str]) -> list[Finding]:
    snapshot = system.nvml()
    if snapshot.get("stage") != "done":
        return []  # the family nvml speaks of that
    known = {device.get("pci") for device in snapshot.get("devices", [])}
    known |= {lost.get("pci") for lost in snapshot.get("lost", [])}
    # One that NVML counts but whose address it could not tell: the family nvml has it.
    unnamed = sum(not lost.get("pci") for lost in snapshot.get("lost", []))
    missing = [a for a in pci if a not in known and not _excluded(system, a)]
    count = f"NVML shows {len(known - {None, ''})} of {len(pci)} GPUs on the PCI bus"
    if len(missing) <= unnamed:
        return []
    return [LOST.found(f"{address} is not among them: {count}", address) for address in missing]


def _excluded(system: System, address: str) -> bool:
    """True if the site told the driver to leave this GPU alone (NVreg_ExcludedGpus)."""
    information = sysfs.text(system, f"/proc/driver/nvidia/gpus/{address}/information")
    return bool(_EXCLUDED.search(information))


def _files(system: System, conf: slurmconf.Conf) -> list[Finding]:
    try:
        files = slurmconf.gpu_files(system)
    except (OSError, ValueError) as err:
        return [UNKNOWN.found(f"gres.conf beside {conf.path}: {err}")]
    found = []
    for file in files:
        try:
            system.entry(file)
        except OSError as err:
            text = f"{file}: {err.strerror}, named by gres.conf beside {conf.path}"
            found.append(FILE.found(text, file))
    return found


CHECK = Check(
    "gpu_count",
    run,
    (UNKNOWN, UNREADABLE, MISSING, LOST, UNCONFIGURED, FILE, SLICES, OTHERS),
    SETTINGS,
    needs_nvml=True,
    cost_ms=4.0,
)
