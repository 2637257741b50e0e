"""Services that must run and kernel modules that must be loaded.

The cgroup of a unit shows that it runs, without a command. systemd is asked only if the cgroup
shows nothing, and only systemd's answer makes a FAIL: in a container neither its cgroups nor the
host's processes may be visible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from health.check import Check, Condition, Setting
from health.finding import Finding
from health.node import proctable
from health.node.ibports import BASE as RDMA
from health.node.kernlog import killed_for_memory
from health.node.sysfs import fleet, link, names, text
from health.node.system import System

DOWN = Condition(
    "service-down",
    "FAIL",
    "node",
    "none",
    "systemd reports that a required unit is not active; class user if the kernel killed it "
    "because memory ran out",
)
FABRIC_MANAGER = Condition(
    "service-fabric-manager",
    "FAIL",
    "node",
    "restart-fabric-manager",
    "the node has NVSwitches, and systemd reports that nvidia-fabricmanager is not active",
)
UNKNOWN = Condition(
    "service-unknown", "WARN", "tool", "none", "the state of a required unit could not be read"
)
IMEX = Condition(
    "service-imex",
    "WARN",
    "node",
    "none",
    "nvidia-imex is enabled, and systemd reports that it failed, or that it stopped although the "
    "fleet's record has it running",
)
MODULE = Condition(
    "module-missing", "FAIL", "node", "none", "a required kernel module is not loaded"
)
PEERMEM = Condition(
    "peermem-missing",
    "WARN",
    "node",
    "none",
    "the fleet's record has nvidia_peermem, but this node with GPUs and RDMA ports does not",
)

FABRIC_UNIT = "nvidia-fabricmanager.service"
# Brokers memory between the nodes of a multi-node NVLink domain. It may be stopped between jobs (a
# prolog starts it), and ends by itself, without error, on a node that is in no domain.
IMEX_UNIT = "nvidia-imex.service"
_IMEX_ENABLED = f"/etc/systemd/system/multi-user.target.wants/{IMEX_UNIT}"
# GPUDirect RDMA: the driver's own module, and the one that it took the place of.
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
_MODULES = "/sys/module"
NVIDIA, BRIDGE_OTHER = "0x10de", "0x068000"  # pci.ids; NVSwitches show this class

# Where systemd keeps a unit's processes: the unified hierarchy, or its own beside cgroup v1.
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd")
NO_SYSTEMD = "systemd does not run here"
_SYSTEMCTL = ("/usr/bin/systemctl", "/bin/systemctl")
_SYSTEMCTL_S = 1.5
_UNIT = re.compile(r"[A-Za-z0-9:_.\\@-]+\.(?:service|socket|target|mount|timer|path)")
_TASK_NAMES = {"nvidia-fabricmanager": "nv-fabricmanager", "munge": "munged"}
_COMM = 15  # the kernel cuts a task's name here


def unit_name(word: str) -> str:
    """ "munge" -> "munge.service". ValueError: that names no unit."""
    name = word if _UNIT.fullmatch(word) else f"{word}.service"
    if not _UNIT.fullmatch(name) or name.startswith("-"):
        raise ValueError(f"{word!r} names no systemd unit")
    return name


def judge_unit(shown: str) -> tuple[str, str]:
    """Read the output of `systemctl show`: one word for the state, and the state in words.

    The word: "up", "failed", "stopped", "missing" or "unknown".
    """
    values = dict(line.partition("=")[::2] for line in shown.splitlines())
    load, active = values.get("LoadState", ""), values.get("ActiveState", "")
    sub = values.get("SubState", "")
    said = f"systemctl reports {load}, {active} ({sub})"
    if active in ("active", "reloading", "refreshing"):
        return "up", said
    if load == "not-found":
        return "missing", said
    if active == "failed" or sub == "auto-restart":
        return "failed", said
    if active in ("inactive", "deactivating"):
        return "stopped", said
    return "unknown", said  # starting, or an answer that this does not know


def _run(system: System) -> list[Finding]:
    options = system.options("services")
    found = []
    wanted: dict[str, Condition] = {}
    for word in options["required"]:
        try:
            wanted[unit_name(word)] = DOWN
        except ValueError as error:
            found.append(UNKNOWN.found(f"services.required: {error}"))
    if _has_nvswitch(system):
        wanted[FABRIC_UNIT] = FABRIC_MANAGER
    if link(system, _IMEX_ENABLED):
        wanted.setdefault(IMEX_UNIT, IMEX)
    record = fleet(system)
    unseen = [unit for unit in wanted if not _in_cgroup(system, unit)]
    for unit, (state, said) in _ask(system, unseen).items():
        condition = wanted[unit]
        down = state in ("failed", "stopped")
        if condition is IMEX:
            if state == "failed" or (down and IMEX_UNIT in _listed(record, "services")):
                found.append(IMEX.found(f"{said}: systemctl status nvidia-imex", unit))
        elif down or (state == "missing" and condition is DOWN):
            theirs = killed_for_memory(system, _task_name(unit))
            said += "; memory ran out, and the kernel killed it" if theirs else ""
            found.append(condition.found(said, unit, cls="user" if theirs else None))
        elif state == "up" or (said == NO_SYSTEMD and condition is FABRIC_MANAGER):
            continue  # not in `required`; the family nvlink reports NVML's view of the fabric
        else:
            try:
                seen = "" if _runs(system, unit) else "no process of its name"
            except OSError as error:
                seen = f"/proc cannot be listed: {error.strerror or error}"
            if seen:
                found.append(UNKNOWN.found(f"{said}; {seen}", unit))
    return found + _modules(system, options["modules"], _listed(record, "modules"))


def running(system: System) -> dict[str, list[str]]:
    """The optional services and modules that are there: for the fleet's record."""
    loaded = names(system, _MODULES)
    return {
        "services": [IMEX_UNIT] if _in_cgroup(system, IMEX_UNIT) else [],
        "modules": [name for name in PEER_MODULES if name in loaded],
    }


def _listed(record: Mapping[str, Any], key: str) -> list[Any]:
    value = record.get(key)
    return value if isinstance(value, list) else []


def _modules(system: System, wanted: Sequence[str], recorded: Sequence[Any]) -> list[Finding]:
    if not (wanted or recorded):
        return []
    loaded = names(system, _MODULES)
    asked = [module.replace("-", "_") for module in wanted]
    found = [MODULE.found(f"no {_MODULES}/{name}", name) for name in asked if name not in loaded]
    peers = [name for name in PEER_MODULES if name in recorded]
    here = set(loaded) | set(asked)
    if peers and here.isdisjoint(PEER_MODULES) and "nvidia" in loaded and names(system, RDMA):
        said = f"no {_MODULES}/{peers[0]} (fleet modules): modprobe {peers[0]}"
        found.append(PEERMEM.found(said, peers[0]))
    return found


def _in_cgroup(system: System, unit: str) -> bool:
    for root in _CGROUPS:
        base = f"{root}/system.slice/{unit}"
        if "populated 1" in text(system, f"{base}/cgroup.events"):
            return True
        if text(system, f"{base}/cgroup.procs"):
            return True
    return False


def _ask(system: System, units: list[str]) -> dict[str, tuple[str, str]]:
    """Ask systemd about each unit: one command for all, which prints a paragraph for each."""
    if not units:
        return {}
    said = NO_SYSTEMD
    if text(system, "/proc/1/comm") == "systemd":
        said = "no systemctl"
        for program in _SYSTEMCTL:
            argv = [program, "show", "--property=LoadState,ActiveState,SubState", "--", *units]
            try:
                shown = system.command(argv, _SYSTEMCTL_S).out.strip().split("\n\n")
            except FileNotFoundError:
                continue
            except OSError as error:
                said = f"systemctl: {error.strerror or error}"
                break
            if len(shown) == len(units):
                return dict(zip(units, map(judge_unit, shown), strict=True))
            said = f"systemctl reported {len(shown)} of {len(units)} units"
            break
    return dict.fromkeys(units, ("unknown", said))


def _runs(system: System, unit: str) -> bool:
    """True if a process has the name of the unit's program."""
    return proctable.runs(system, _task_name(unit))


def _task_name(unit: str) -> str:
    base = unit.rpartition(".")[0]
    return _TASK_NAMES.get(base, base)[:_COMM]


def _has_nvswitch(system: System) -> bool:
    bound = names(system, "/sys/bus/pci/drivers/nvidia-nvswitch")
    if bound:  # else "bind", "new_id", "uevent", "unbind" would be there, but no address
        return any(name.count(":") == 2 for name in bound)
    base = "/sys/bus/pci/devices"
    return any(
        text(system, f"{base}/{device}/class") == BRIDGE_OTHER
        and text(system, f"{base}/{device}/vendor") == NVIDIA
        for device in names(system, base)
    )


CHECK = Check(
    name="services",
    run=_run,
    conditions=(DOWN, FABRIC_MANAGER, IMEX, UNKNOWN, MODULE, PEERMEM),
    settings={
        "required": Setting([], 'systemd units that must be active: "munge", "sssd.service"'),
        "modules": Setting([], 'kernel modules that must be loaded: "nvidia_peermem"'),
    },
    closes_on_error=False,
    deadline_s=3.0,
    cost_ms=1.0,
)
