"""Xids, SXids and lost GPUs of the kernel's log and of the node's history, as far as uncured."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from health.check import Check, Condition, Setting
from health.finding import ACTIONS, ActionName, Finding
from health.node.gpu_snapshot import GpuSnapshot
from health.node.kernlog import quoted
from health.node.system import Event, System
from health.nvidia import xid
from health.nvidia.xid_catalog import SXIDS, XIDS
from robust_slurm.text import ago

if TYPE_CHECKING:  # a healthy node does not need it
    from health.history.cures import Driver
    from health.history.state import Fault, NodeState, Note, StateRules

SETTINGS = {
    "recent": Setting(3600.0, "how long Xids without a required action are reported", "s"),
    "wear": Setting(
        4, "signs of wear (63, 92, …) of one GPU in wear_days that raise a warning", "messages"
    ),
    "wear_days": Setting(28.0, "window of wear", "days"),
    "contained": Setting(
        3, "contained memory errors (94) since the last reset after which a reset is required"
    ),
    "returns": Setting(
        2, "recurrences of a fault after its repair before the next stronger action"
    ),
    "return_days": Setting(14.0, "window of returns and reboots", "days"),
    "reboots": Setting(2, "reboots for a cause in return_days; one more requires service"),
    "app_users": Setting(3, "users with Xid 13 or 31 on one GPU only that raise a warning"),
    "app_days": Setting(14.0, "window of app_users", "days"),
    "overrides": Setting({}, "actions per Xid; set them in the [xid] table"),
}
# NVIDIA's catalogue covers Ampere and later (docs.nvidia.com/deploy/xid-errors); before, memory
# retires pages (docs.nvidia.com/deploy/dynamic-page-retirement), and these are the two messages.
_PAGES = {
    63: "memory page retired, takes effect when the driver is loaded again",
    64: "memory page could not be retired",
}
_OLDER = (
    "this GPU retires pages: NVIDIA's catalogue of Xids covers Ampere and later only, compare "
    "docs.nvidia.com/deploy/xid-errors for older GPUs"
)
_NOT_FAILING = (45,)  # in the catalogue with an action, but never closing by itself


def _numbered() -> tuple[Condition, ...]:
    return tuple(
        Condition(f"xid-{code}", "FAIL", "node", cast("ActionName", row[5]), row[1])
        for code, row in XIDS.items()
        if row[5] != "none" and code not in _NOT_FAILING
    )


CONDITIONS = (
    *_numbered(),
    Condition("xid-45", "WARN", "node", "restart-fabric-manager", "45 with no other Xid near"),
    Condition(
        "xid-94", "WARN", "node", "none", "contained memory error; FAIL at `contained` of them"
    ),
    Condition("xid-wear", "WARN", "node", "none", "`wear` signs of wear of one GPU in wear_days"),
    Condition("xid-app", "WARN", "user", "none", "an Xid of a program, not older than `recent`"),
    Condition(
        "xid-app-users",
        "WARN",
        "node",
        "none",
        "13 or 31 on one GPU in jobs of `app_users` users in app_days: test the GPU",
    ),
    Condition("xid-unlisted", "WARN", "node", "none", "an Xid for which NVIDIA names no action"),
    Condition("gpu-fell-off-bus", "FAIL", "node", "reboot", "a GPU fell off the bus, without Xid"),
    Condition("gpu-init-failed", "FAIL", "node", "reboot", "the driver could not start a GPU"),
    Condition("sxid-fatal", "FAIL", "node", "reset-gpu", "fatal NVSwitch error"),
    Condition("sxid-always-fatal", "FAIL", "node", "reboot", "NVSwitch error fatal for the fabric"),
    Condition("sxid-nonfatal", "WARN", "node", "none", "NVSwitch error to look at"),
    Condition("reboots-for-cause", "FAIL", "node", "service", "more than `reboots` of them"),
)
_BY_ID = {condition.check: condition for condition in CONDITIONS}


def run(system: System) -> list[Finding]:
    options = system.options("xid")
    boot, now = system.boot_id(), system.now()
    events = xid.merge(system.history(), _log(system))
    if not any(event.kind in ("xid", "sxid", "lost", "drain", "app-xid") for event in events):
        return []
    from health.history.state import node_state

    snapshot = system.nvml()
    state = node_state(events, now, boot, driver(snapshot), rules(options))
    names = {device["pci"]: f"gpu{device['index']}" for device in _located(snapshot)}
    older = {device["pci"] for device in _located(snapshot) if _retires_pages(device)}
    found = [_fault(fault, names, now, older) for fault in state.faults]
    if state.reboots:
        found.append(_BY_ID["reboots-for-cause"].found(state.reboots))
    found += _notes(state, names, now, options)
    return found + _suspects(events, names, now, options)


def rules(options: Mapping[str, Any]) -> StateRules:
    """The family's settings as node_state wants them."""
    from health.history.state import StateRules

    overrides = {
        int(code): cast("ActionName", action)
        for code, action in options["overrides"].items()
        if str(code).isdigit() and action in ACTIONS
    }
    same = ("returns", "return_days", "reboots", "contained", "wear_days")
    return StateRules(overrides, **{key: options[key] for key in same})


def driver(snapshot: GpuSnapshot) -> Driver:
    """The state that NVML reports now, in the form that node_state needs."""
    from health.history.cures import Driver

    devices = [device for device in snapshot.get("devices", []) if "pci" in device]
    words = {d["pci"]: d["recovery_action"] for d in devices if "recovery_action" in d}
    branch = snapshot.get("driver", "").split(".")[0]
    return Driver(
        words,
        frozenset(device["pci"] for device in devices),
        int(branch) if branch.isascii() and branch.isdigit() else 0,
    )


def _located(snapshot: GpuSnapshot) -> list[Any]:
    both = [*snapshot.get("devices", []), *snapshot.get("lost", [])]
    return [one for one in both if "pci" in one and "index" in one]


def _retires_pages(device: Any) -> bool:
    """True for a GPU of Turing or before: pages are retired, rows cannot be remapped."""
    errors = device.get("errors", {})
    return "retired" in device and errors.get("remap") == "NVML_ERROR_NOT_SUPPORTED"


def _fault(fault: Fault, names: Mapping[str, str], now: float, older: Collection[str]) -> Finding:
    condition = _BY_ID.get(fault.check) or Condition(fault.check, "FAIL", "node", "none", "")
    evidence = [_told(fault.code, fault.times, fault.last, now, fault.text)]
    if fault.why:
        evidence.append(fault.why)
    evidence.append(quoted(fault.text))
    if fault.gpu in older:
        evidence.append(_OLDER)
    device = fault.unit or names.get(fault.gpu, fault.gpu)
    return condition.found("; ".join(evidence), device, status="FAIL", action=fault.action)


def _notes(
    state: NodeState, names: Mapping[str, str], now: float, options: Mapping[str, Any]
) -> list[Finding]:
    """One finding per condition and GPU."""
    grouped: dict[tuple[str, str], list[Note]] = {}
    closed = {(fault.check, fault.gpu) for fault in state.faults}
    for note in state.notes:
        lasting = note.code in (94, 163)
        old = now - note.last > options["recent"] and not lasting
        if note.check == "xid-wear" or old or (note.check, note.gpu) in closed:
            continue
        grouped.setdefault((note.check, note.unit or names.get(note.gpu, note.gpu)), []).append(
            note
        )
    out = []
    for (check, device), notes in grouped.items():
        counts: dict[int, int] = {}
        for note in notes:
            counts[note.code] = counts.get(note.code, 0) + note.times
        last = max(notes, key=lambda note: note.last)
        told = "; ".join(_told(code, n, last.last, now) for code, n in sorted(counts.items()))
        out.append(_BY_ID[check].found(f"{told}; {quoted(last.text)}", device))
    for gpu, codes in sorted(state.wear.items()):
        if sum(codes.values()) >= options["wear"]:
            told = ", ".join(f"{n} x {code}" for code, n in sorted(codes.items()))
            evidence = f"{told} in {options['wear_days']:g} days, limit {options['wear']}"
            out.append(_BY_ID["xid-wear"].found(evidence, names.get(gpu, gpu)))
    return out


def _suspects(
    events: list[Event], names: Mapping[str, str], now: float, options: Mapping[str, Any]
) -> list[Finding]:
    from health.nvidia.suspects import suspects

    found = suspects(events, now, options["app_users"], options["app_days"])
    advice = "test it: robust-health test (docs/active-tests.md)"
    condition = _BY_ID["xid-app-users"]
    return [
        condition.found(f"{text}; {advice}", names.get(gpu, gpu)) for gpu, text in found.items()
    ]


def of_job(system: System) -> list[Event]:
    """Events of programs' Xids on the GPUs of the ending job, for its epilog to write down."""
    from health.checks.gpu.gpu_leftovers import allocated
    from health.nvidia import suspects

    known, boot, now = system.context, system.boot_id(), system.now()
    if known.job <= 0 or known.uid <= 0:
        return []
    had = allocated(system)
    gpus = {d["pci"] for d in _located(system.nvml()) if d["index"] in had}
    merged = xid.merge(system.history(), _log(system))
    found = suspects.of_job(merged, gpus, now - system.options("xid")["recent"])
    job = {"job": known.job, "uid": known.uid}
    return [
        Event(now, suspects.KIND, boot, {"gpu": gpu, "codes": codes} | job)
        for gpu, codes in sorted(found.items())
    ]


def _told(code: int, times: int, last: float, now: float, line: str = "") -> str:
    meaning = XIDS[code][1] if code in XIDS else SXIDS[code][2] if code in SXIDS else ""
    if "Dynamic Page Retirement" in line:
        meaning = _PAGES.get(code, meaning)
    kind = "SXid" if code >= 10000 else "Xid"
    what = f"{kind} {code}" if code else "GPU lost"
    text = f"{what} ({meaning})" if meaning else what
    return f"{text}, {times} x, last {ago(last, now)}"


def events(system: System) -> list[Event]:
    """The events that the history does not hold yet, for the gate's edge to write there."""
    return xid.fresh(system.history(), _log(system))


def _log(system: System) -> list[Event]:
    log, boot = system.kernel_log(), system.boot_id()
    return xid.events_from_log(log, boot, system.now(), system.uptime())


CHECK = Check(
    name="xid",
    run=run,
    conditions=CONDITIONS,
    settings=SETTINGS,
    needs_nvml=True,
    cost_ms=3.0,
)
