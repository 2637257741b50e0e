"""All families and their folders ("rooms"), in the order of their findings in a report.

A new family is a file in one of the rooms: it is found there, and needs no line here.

A family that cannot be imported is still a check: one that raises, so that the gate stays closed
and reports why, instead of leaving the family out. Therefore the families that every installation
has are named: a file that is missing closes the gate, too.
"""

from __future__ import annotations

import os
from importlib import import_module

from health.check import Check
from health.finding import Finding
from health.node.system import System

_ROOMS = ("gpu", "host", "network")
# The order decides which of several equally hard findings leads the drain reason.
_NAMED = {
    # GPU
    "gpu_count": "gpu",
    "nvml": "gpu",
    "gpu_recovery": "gpu",
    "gpu_ecc": "gpu",
    "gpu_memory": "gpu",
    "gpu_clocks": "gpu",
    "gpu_thermal": "gpu",
    "gpu_pcie": "gpu",
    "nvlink": "gpu",
    "gpu_modes": "gpu",
    "gpu_versions": "gpu",
    "gpu_leftovers": "gpu",
    # kernel log
    "xid": "gpu",
    "machine_check": "host",
    "pcie_aer": "host",
    "kernel_log": "host",
    # host
    "mounts": "host",
    "disk": "host",
    "nvme_smart": "host",
    "memory": "host",
    "cpu": "host",
    "processes": "host",
    "services": "host",
    "clock": "host",
    "ethernet": "network",
    "infiniband": "network",
    "topology": "gpu",
    "bmc": "host",
    "slurmd": "host",
    "site": "host",  # last: the time that these commands take is no other check's
}


def families(top: str) -> dict[str, str]:
    """Return family -> room: those named above, and before the last one those with a file only."""
    found = {name: room for room in _ROOMS for name in _files(f"{top}/{room}")}
    *first, last = _NAMED.items()
    new = [(name, room) for name, room in found.items() if name not in _NAMED]
    return dict([*first, *new, last])


def _files(directory: str) -> list[str]:
    """Return the modules of a room; files of editors or archives are ignored. If a room cannot be
    listed, its families cannot be imported either, which closes the gate."""
    try:
        files = [entry.name for entry in os.scandir(directory) if entry.is_file()]
    except OSError:
        return []
    names = sorted(name.removesuffix(".py") for name in files if name.endswith(".py"))
    return [name for name in names if name.isidentifier() and not name.startswith("_")]


FAMILIES = families(__file__.rpartition("/")[0])


def module(name: str) -> str:
    """Return the module of a family."""
    return f"health.checks.{FAMILIES[name]}.{name}"


def load(name: str) -> Check:
    """Return the family's CHECK, or one that raises what its import raised."""
    try:
        check = import_module(module(name)).CHECK
    except (Exception, SystemExit) as err:  # noqa: BLE001 - one broken family takes no other along
        return _broken(name, err)
    return check if isinstance(check, Check) else _broken(name, TypeError("CHECK is no Check"))


def _broken(name: str, err: BaseException) -> Check:
    text = f"{module(name)} cannot be imported: {type(err).__name__}: {err}"

    def run(system: System) -> list[Finding]:
        raise ImportError(text)

    return Check(name, run, (), {})


ALL: tuple[Check, ...] = tuple(load(name) for name in FAMILIES)
