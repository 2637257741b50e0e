"""Proof that a fault was cured: unrecorded resets, and proofs before an undrain. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from health.finding import ACTIONS, ActionName
from health.history.order import since
from health.node.system import Event
from health.nvidia import xid, xid_lines
from health.nvidia.xid_policy import order

# NVML is asked before the log is read: a message younger than this may be newer than its answer.
SETTLE_S = 30.0
_RESET_WORDS = (1, 4)  # recovery actions that end in a reset of the GPU


class Driver(NamedTuple):
    """NVML's current state: recovery actions, and GPUs that answer, by PCI address."""

    words: Mapping[str, int] = {}
    alive: frozenset[str] = frozenset()
    branch: int = 0  # of the driver's version, 580; 0: unknown


def noticed_resets(events: Sequence[Event], now: float, boot: str, driver: Driver) -> list[Event]:
    """Infer unrecorded resets: Xid 154 asked for one, and NVML no longer does.

    The caller may write these events into the history; their time is that of the inference.
    """
    asked: dict[str, tuple[float, int]] = {}
    for event in sorted((e for e in events if e.boot == boot), key=order):
        if event.kind == "xid" and xid.number(event, "code") == 154:
            changed = xid_lines.recovery(xid.word(event, "text"))
            if changed:
                asked[xid.word(event, "gpu")] = (xid.end(event), changed[1])
        elif event.kind == "driver":
            asked.clear()
        elif event.kind == "reset":
            gpu = xid.word(event, "gpu")
            asked = {g: a for g, a in asked.items() if gpu and g != gpu}
    return [
        Event(now - SETTLE_S, "reset", boot, {"gpu": gpu, "source": "nvml"})
        for gpu, (last, word) in sorted(asked.items())
        if word in _RESET_WORDS and driver.words.get(gpu) == 0 and last <= now - SETTLE_S
    ]


def cured(
    action: ActionName,
    gpu: str,
    drained: Event,
    events: Iterable[Event],
    boot: str,
    booted: float,
) -> str:
    """The reason why ``action`` is unproven since the drain; "" if its proof is there.

    ``gpu``: the PCI address the drain was about, "" for the node. ``booted``: wall clock of the
    running boot. The caller verifies that the checks pass again.
    """
    proof = ACTIONS[action].proof
    later = since(events, drained, boot)
    if proof == "recheck" or any(event.kind == "repaired" for event in later):
        return ""
    if proof == "person":
        return "`robust-health repaired` was not run since the drain"
    # The boot's id where it is known: a clock that is set makes any boot look younger.
    if (drained.boot != boot) if drained.boot else (booted > drained.time):
        return ""
    if proof == "reboot":
        return "the node has not rebooted since the drain"
    for event in later:
        place = xid.word(event, "gpu")
        if event.kind == "driver" or (event.kind == "reset" and place in ("", gpu)):
            return ""
    what = gpu or "a GPU"
    return f"no reset of {what}, reload of the driver or reboot since the drain"
