"""All families, in the order in which their findings stand in a report.

A family that cannot be imported is still a check: one that raises, so that the gate stays closed
and says why, instead of leaving the family out.
"""

from __future__ import annotations

from importlib import import_module

from health.check import Check
from health.finding import Finding
from health.system import System

FAMILIES = (
    # GPU
    "gpu_count",
    "nvml",
    "gpu_recovery",
    "gpu_ecc",
    "gpu_memory",
    "gpu_clocks",
    "gpu_thermal",
    "gpu_pcie",
    "nvlink",
    "gpu_modes",
    "gpu_versions",
    "gpu_leftovers",
    # kernel log
    "xid",
    "machine_check",
    "pcie_aer",
    "kernel_log",
    # host
    "mounts",
    "disk",
    "nvme_smart",
    "memory",
    "cpu",
    "processes",
    "services",
    "clock",
    "ethernet",
    "infiniband",
    "topology",
    "bmc",
    "slurmd",
    "site",  # last: the time that these commands take is no other check's
)


def load(name: str) -> Check:
    """The family's CHECK, or one that raises what its import raised."""
    try:
        check = import_module(f"health.checks.{name}").CHECK
    except Exception as err:  # noqa: BLE001 - a broken family must not take the others with it
        return _broken(name, err)
    return check if isinstance(check, Check) else _broken(name, TypeError("CHECK is no Check"))


def _broken(name: str, err: Exception) -> Check:
    text = f"health.checks.{name} cannot be imported: {type(err).__name__}: {err}"

    def run(system: System) -> list[Finding]:
        raise ImportError(text)

    return Check(name, run, (), {})


ALL: tuple[Check, ...] = tuple(load(name) for name in FAMILIES)
