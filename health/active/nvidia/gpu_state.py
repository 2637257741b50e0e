"""The GPU state that an active test may leave changed: recorded before, compared, and restored.

NVIDIA's own field diagnostic once took a frequency lock away, and the machines were slow from
then on (ByteRobust, section 9). NVML is asked in a process of its own: a driver that hangs holds
only that one. NVML can lock the clocks but does not report a lock, so a lock is neither compared
nor restored. Processes are recorded for ``busy`` only, and not compared.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from health.active.nvidia import tools
from health.finding import ActionName, Finding
from health.nvidia.nvml import driver_loaded
from robust_slurm import commands

CHANGED, ERROR = "active-state-changed", "active-error"
DEADLINE_S = 20.0  # without persistence mode, eight GPUs take some 10 s to start
_NOTHING_HERE = ("no-library", "no-pynvml", "NVML_ERROR_DRIVER_NOT_LOADED")
_COMPUTE_MODES = ("default", "exclusive_thread", "prohibited", "exclusive_process")


class GpuItem(NamedTuple):
    """One thing that is compared. ``slows``: the GPU is slower with a lower value."""

    words: str
    unit: str  # "MHz", "mW", "on/off", "mode"
    cure: str  # what a person types; {i} the GPU's index, {v} the value
    slows: bool = False


ITEMS: Mapping[str, GpuItem] = {
    "app_sm": GpuItem(
        "application clock of the SMs", "MHz", "nvidia-smi -i {i} -ac MEMORY,{v}", True
    ),
    "app_memory": GpuItem(
        "application clock of the memory", "MHz", "nvidia-smi -i {i} -ac {v},SM", True
    ),
    "power_limit": GpuItem("power limit", "mW", "nvidia-smi -i {i} -pl {v}", True),
    "enforced_limit": GpuItem("enforced power limit", "mW", "nvidia-smi -i {i} -pl {v}", True),
    "persistence": GpuItem("persistence mode", "on/off", "nvidia-smi -i {i} -pm {v}"),
    "compute_mode": GpuItem("compute mode", "mode", "nvidia-smi -i {i} -c {v}"),
    "mig": GpuItem("MIG mode", "on/off", "nvidia-smi -i {i} -mig {v}"),
    "mig_pending": GpuItem("MIG mode after the next reset", "on/off", "nvidia-smi -i {i} -mig {v}"),
    "ecc": GpuItem("ECC mode", "on/off", "nvidia-smi -i {i} -e {v}, then a reset"),
    "ecc_pending": GpuItem("ECC mode after the next reset", "on/off", "nvidia-smi -i {i} -e {v}"),
}


class Gpu(NamedTuple):
    """``number``: NVML's index. ``values`` by a name in ITEMS.

    ``missing``: why a value is not there, by NVML's name of the error.
    """

    number: int
    uuid: str
    values: Mapping[str, int]
    missing: Mapping[str, str] = {}
    processes: tuple[int, ...] = ()


class GpuState(NamedTuple):
    """The GPUs of a node; none and no ``error``: there is no NVIDIA GPU to look at.

    ``lost``: index of a GPU that is counted but does not answer, and NVML's error.
    """

    gpus: tuple[Gpu, ...] = ()
    lost: Mapping[int, str] = {}
    error: str = ""


class GpuChange(NamedTuple):
    gpu: Gpu  # as it was before
    item: str
    after: int


def take(deadline_s: float = DEADLINE_S) -> GpuState:
    """The state now, within the deadline; never raises for what the driver does."""
    said, problem = _in_child("take", "", deadline_s)
    gpus, lost, error = [], {}, problem
    for kind, value in said:
        if kind == "gpu":
            gpus.append(_gpu(value))
        elif kind == "lost":
            lost[int(value[0])] = str(value[1])
        elif kind == "error":
            error = str(value)
    if error in _NOTHING_HERE and not driver_loaded():
        return GpuState()
    return GpuState(tuple(gpus), lost, error)


def busy(state: GpuState) -> tuple[str, ...]:
    """The reasons not to start a test that needs the GPUs to itself: one line per GPU in use."""
    lines = []
    for gpu in state.gpus:
        if gpu.processes:
            some = ", ".join(map(str, gpu.processes[:8]))
            lines.append(f"gpu{gpu.number} is used by process {some}")
        if gpu.values.get("mig"):
            lines.append(f"gpu{gpu.number} has MIG on")
    return tuple(lines)


def mig(state: GpuState) -> tuple[str, ...]:
    """The GPUs with MIG on, which nothing may use as a whole."""
    return tuple(f"gpu{gpu.number}" for gpu in state.gpus if gpu.values.get("mig"))


def differences(before: GpuState, after: GpuState) -> list[Finding]:
    """Findings about each difference. A GPU that is slower than before fails the node."""
    unread = _unread(before, after)
    if unread:
        return [unread]
    found = _gone(before, after) + _not_told(before, after)
    return found + [_found(change) for change in changes(before, after)]


def restore(before: GpuState, after: GpuState, deadline_s: float = DEADLINE_S) -> list[Finding]:
    """Restore the values that changed, as far as root may; return findings on all changes.

    A restored value is only a WARN.
    """
    first = changes(before, after)
    if os.geteuid() != 0 or _unread(before, after) or not first:
        return differences(before, after)
    said, problem = _in_child("put", json.dumps(_orders(first)), deadline_s)
    failed = [str(value) for kind, value in said if kind in ("failed", "error")]
    failed += [problem] if problem else []
    now = take(deadline_s)
    found = differences(before, now)
    left = {(c.gpu.uuid, c.item) for c in changes(before, now)}
    if not now.error:
        found += [_found(c, back=True) for c in first if (c.gpu.uuid, c.item) not in left]
    if failed:
        text = "not put back after the tests: " + "; ".join(failed[:4])
        found.append(Finding("WARN", "tool", CHANGED, "", text, "none"))
    return found


def changes(before: GpuState, after: GpuState) -> list[GpuChange]:
    """The values that changed; the enforced limit only if the set limit did not change with it."""
    now = {_key(gpu): gpu for gpu in after.gpus}
    out = []
    for gpu in before.gpus:
        other = now.get(_key(gpu))
        if other is None:
            continue
        mine = [
            GpuChange(gpu, item, other.values[item])
            for item, value in gpu.values.items()
            if item in ITEMS and other.values.get(item, value) != value
        ]
        own = {change.item for change in mine}
        out += [c for c in mine if c.item != "enforced_limit" or "power_limit" not in own]
    return out


def _key(gpu: Gpu) -> str:
    return gpu.uuid or f"gpu{gpu.number}"


def _unread(before: GpuState, after: GpuState) -> Finding | None:
    for when, state in (("before", before), ("after", after)):
        if state.error:
            text = f"the GPUs' state could not be read {when} the tests: {state.error}; "
            text += "whether they changed clocks or modes is not known: look at nvidia-smi -q"
            return Finding("ERROR", "tool", ERROR, "", text, "none")
    return None


def _gone(before: GpuState, after: GpuState) -> list[Finding]:
    there = {_key(gpu) for gpu in after.gpus}
    found = []
    for gpu in before.gpus:
        if _key(gpu) not in there:
            error = after.lost.get(gpu.number, "")
            action: ActionName = "reset-gpu" if "RESET_REQUIRED" in error else "reboot"
            text = (
                "answered before the tests but not after them: "
                f"{error or 'NVML no longer lists it'}"
            )
            found.append(Finding("FAIL", "node", CHANGED, f"gpu{gpu.number}", text, action))
    return found


def _not_told(before: GpuState, after: GpuState) -> list[Finding]:
    now = {_key(gpu): gpu for gpu in after.gpus}
    return [
        Finding(
            "WARN",
            "tool",
            CHANGED,
            f"gpu{gpu.number}",
            f"{ITEMS[item].words} {_say(item, gpu.values[item])} before the tests, not reported "
            f"after: {why}",
            "none",
        )
        for gpu in before.gpus
        if _key(gpu) in now
        for item, why in now[_key(gpu)].missing.items()
        if item in ITEMS and item in gpu.values
    ]


def _found(change: GpuChange, back: bool = False) -> Finding:
    gpu, item, after = change
    before, about = gpu.values[item], ITEMS[item]
    text = f"{about.words} {_say(item, before)} before the tests, {_say(item, after)} after (NVML)"
    if back:
        text += "; put back"
    else:
        value = before // 1000 if about.unit == "mW" else before
        text += "; " + about.cure.format(i=gpu.number, v=value)
    slower = about.slows and after < before and not back
    device = f"gpu{gpu.number}"
    if slower:
        return Finding("FAIL", "node", CHANGED, device, text, "reset-gpu")
    return Finding("WARN", "tool", CHANGED, device, text, "none")


def _say(item: str, value: int) -> str:
    unit = ITEMS[item].unit
    if unit == "mW":
        return f"{value / 1000:g} W"
    if unit == "on/off":
        return "on" if value else "off"
    if unit == "mode":
        return _COMPUTE_MODES[value] if 0 <= value < len(_COMPUTE_MODES) else str(value)
    return f"{value} {unit}"


def _orders(first: list[GpuChange]) -> list[tuple[str, str, list[int]]]:
    """Calls of NVML: uuid, function, arguments. MIG and ECC want a reset: a person's decision."""
    orders = []
    for gpu, item, _ in first:
        values, call, args = gpu.values, "", [gpu.values[item]]
        if item in ("app_sm", "app_memory") and {"app_sm", "app_memory"} <= set(values):
            call = "nvmlDeviceSetApplicationsClocks"
            args = [values["app_memory"], values["app_sm"]]
        elif item == "power_limit":
            call = "nvmlDeviceSetPowerManagementLimit"
        elif item == "persistence":
            call = "nvmlDeviceSetPersistenceMode"
        elif item == "compute_mode":
            call = "nvmlDeviceSetComputeMode"
        if call and (gpu.uuid, call, args) not in orders:
            orders.append((gpu.uuid, call, args))
    return orders


def _gpu(value: Mapping[str, Any]) -> Gpu:
    values = {key: int(value[key]) for key in ITEMS if key in value}
    missing = {str(k): str(v) for k, v in value["errors"].items()}
    pids = tuple(int(pid) for pid in value.get("processes", ()))
    return Gpu(int(value["index"]), str(value.get("uuid", "")), values, missing, pids)


def _in_child(verb: str, order: str, deadline_s: float) -> tuple[list[tuple[str, Any]], str]:
    """Run gpu_nvml in a process of its own; return its answers, and the error ("" if none)."""
    module = "health.active.nvidia.gpu_nvml"
    plain = [sys.executable, "-I" if sys.flags.isolated else "-P", *commands.words(module)]
    argv = [*(commands.again(module) if sys.flags.no_site else plain), verb, order]
    try:
        ran = tools.run(argv, deadline_s, os.environ)
    except OSError as err:
        return [], f"no process for NVML: {err.strerror}"
    said: list[tuple[str, Any]] = []
    stage = "start"
    for line in ran.out.splitlines():
        try:
            kind, value = json.loads(line)
        except ValueError:
            continue  # cut off by the deadline
        if kind == "stage":
            stage = str(value)
        else:
            said.append((str(kind), value))
    if ran.cut:
        return said, f"NVML {ran.cut}, asked for {stage}"
    if ran.code or stage != "done":
        last = ran.err.strip().splitlines()[-1:]
        return said, f"NVML's process ended with {ran.code} at {stage}: {' '.join(last)[:200]}"
    return said, ""
