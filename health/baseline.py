"""The values of this node, recorded as right for all nodes of its kind: fleet.json.

{"driver": ["570.86.15"],
 "vbios": {"NVIDIA H100 80GB HBM3": ["96.00.74.00.01"]},
 "max_clocks": {model: {"sm": MHz, "memory": MHz}}, "nvlinks": {model: active links},
 "power_limits": {model: W in force},
 "pcie": {model: {"generation": the highest that GPU and slot reach, "width": lanes in use}},
 "memory": KiB, "nvme_local": NVMe controllers of the node's own,
 "ethernet": {interface of a default route: Mb/s},
 "infiniband": {active port: {"rate": Gb/s, "firmware": ["28.39.1002"]}},
 "services": ["nvidia-imex.service"], "modules": ["nvidia_peermem"],
 "topology": {model of server: what health/checks/gpu/topology.py observes}}

From "memory" on, only topology is kept by model: the other values hold only if all nodes are alike.
"nvme" is the same as "nvme_local", for gates of earlier releases; in records of these it counts the
controllers over a network, too. The check disk compares with the smaller one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from health.children.call import call_in_child
from health.node import rootfiles, sysfs
from health.node.gpu_snapshot import Device
from health.node.system import System
from health.settings import Settings

FILE = "fleet.json"
_SHARED_S = 20.0
_WHOLE = ("ethernet", "infiniband")  # replaced as a whole: a port that is gone is not expected


class BaselineError(ValueError):
    """No baseline can be recorded, or not everywhere; the text says why."""


def observe(system: System, host: bool) -> dict[str, Any]:
    """Read the values of this node. Raises BaselineError where NVML does not report them."""
    snapshot = system.nvml()
    out: dict[str, Any] = {}
    if snapshot.get("devices") and snapshot.get("stage") == "done":
        out["driver"] = [snapshot.get("driver", "")]
        for device in snapshot["devices"]:
            _of_device(out, device)
    elif not host:
        why = snapshot.get("error") or ("it hangs" if snapshot.get("hung") else "")
        said = f" ({why}, at: {snapshot.get('stage', '')})" if why else ""
        raise BaselineError(f"NVML reports no GPU here{said}; --host records the rest of the node")
    if host:
        out |= _of_host(system)
    return out


def _of_host(system: System) -> dict[str, Any]:
    """Read the host's values. Ports and interfaces that are down are left out: not expected up."""
    from health.checks.gpu import topology
    from health.checks.host.memory import parse_meminfo
    from health.checks.host.services import running
    from health.checks.network.ethernet import default_speeds
    from health.node.ibports import ports

    found = {
        port.name: {"rate": port.rate, "firmware": [port.firmware] if port.firmware else []}
        for port in ports(system)
        if port.active
    }
    nvme = len(sysfs.local_nvme(system))
    return {
        "memory": parse_meminfo(system.read("/proc/meminfo"))["MemTotal"],
        "nvme": nvme,
        "nvme_local": nvme,
        "infiniband": found,
        "ethernet": default_speeds(system),
        **running(system),
        "topology": topology.observe(system),
    }


def _of_device(out: dict[str, Any], device: Device) -> None:
    model = device.get("name", "")
    if "vbios" in device:
        known = out.setdefault("vbios", {}).setdefault(model, [])
        if device["vbios"] not in known:
            known.append(device["vbios"])
    clocks = device.get("clocks", {})
    if "max_sm" in clocks and "max_memory" in clocks:
        both = {"sm": clocks["max_sm"], "memory": clocks["max_memory"]}
        _most(out.setdefault("max_clocks", {}).setdefault(model, {}), both)
    pcie = device.get("pcie", {})
    if pcie.get("max_generation") and pcie.get("width"):
        # The width in use: it never changes, and a slot may be wired for less than the GPU can.
        both = {"generation": pcie["max_generation"], "width": pcie["width"]}
        _most(out.setdefault("pcie", {}).setdefault(model, {}), both)
    power = device.get("power", {})
    limit = round(power.get("enforced_limit", 0.0) or power.get("limit", 0.0))
    if limit:
        _most(out.setdefault("power_limits", {}), {model: limit})
    if "nvlinks" in device:
        active = sum(link.get("active", False) for link in device["nvlinks"])
        _most(out.setdefault("nvlinks", {}), {model: active})


def _most(best: dict[str, int], values: Mapping[str, int]) -> None:
    """Keep the best value of several GPUs of a model: a degraded one sets no standard."""
    for name, value in values.items():
        best[name] = max(best.get(name, 0), value)


def merge(known: Mapping[str, Any], found: Mapping[str, Any], add: bool) -> dict[str, Any]:
    """Return the record updated with ``found``; with ``add``, lists of versions are extended."""
    out = dict(known)
    for key, value in found.items():
        old = out.get(key)
        if key in _WHOLE and not add:
            out[key] = value
        elif key == "topology" and isinstance(old, dict):
            out[key] = {**old, **value}  # each model of server as a whole
        elif isinstance(value, dict) and isinstance(old, dict):
            out[key] = merge(old, value, add)
        elif isinstance(value, list) and isinstance(old, list) and add:
            out[key] = [*old, *(item for item in value if item not in old)]
        else:
            out[key] = value
    return out


def save(settings: Settings, found: Mapping[str, Any], add: bool) -> list[str]:
    """Write the shared file, if the site has a state directory, and this node's copy of it.

    Return the lines to show. Raises OSError when the local file cannot be written, BaselineError
    when the shared one cannot.
    """
    spool = str(settings.gate["spool"])
    os.makedirs(spool, mode=0o755, exist_ok=True)  # noqa: PTH103
    lines = []
    if settings.state_dir:
        shared = f"{settings.state_dir}/nodes"
        merged, failed = call_in_child(lambda: _update(shared, found, add), _SHARED_S)
        if failed:
            raise BaselineError(f"{shared}/{FILE}: {failed}")
        lines.append(f"recorded for all nodes in {shared}/{FILE}")
        merged = _update(spool, merged, False)
    else:
        merged = _update(spool, found, add)
        lines.append("no state_dir in robust.toml: recorded for this node only")
    lines.append(f"recorded in {spool}/{FILE}:")
    return [*lines, json.dumps(merged, indent=1)]


def _update(directory: str, found: Mapping[str, Any], add: bool) -> dict[str, Any]:
    """Merge into one file, under its lock; the directory must be there."""
    with (
        rootfiles.closing(rootfiles.open_dir(directory)) as where,
        rootfiles.closing(rootfiles.lock(where, f"{FILE}.lock")),
    ):
        merged = merge(_load(where), found, add)
        text = json.dumps(merged, indent=1, sort_keys=True) + "\n"
        rootfiles.replace(where, FILE, text.encode())
        return merged


def _load(directory: int) -> dict[str, Any]:
    try:
        fd = rootfiles.open_file(directory, FILE, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    with os.fdopen(fd, "rb") as file:
        try:
            found = json.loads(file.read(4 << 20))
        except (ValueError, RecursionError) as err:
            raise OSError(f"it is not JSON ({err}); remove it and record again") from None
    if not isinstance(found, dict):
        raise OSError("it is not a JSON object; remove it and record again")
    return found
