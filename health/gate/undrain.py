"""The decision on an undrain: only a drain of ours, and only once its action was done. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from health.gate.holds import settled
from health.history.cures import cured
from health.history.order import newest, since
from health.node.system import Event
from robust_slurm.drain_reason import Reason, parse_reason, without_reboot

# Flags that say nothing about the node's health. Any other one means that a person or Slurm itself
# is working on the node (DOWN, FAIL, MAINTENANCE, REBOOT_ISSUED, POWERED_DOWN, …).
HARMLESS = frozenset(
    {
        "ALLOCATED",
        "CLOUD",
        "COMPLETING",
        "DRAIN",
        "DYNAMIC_NORM",
        "IDLE",
        "MIXED",
        "PLANNED",
        "RESERVED",
    }
)
# Slurm's reasons for a gate that ended with 1 and could not place its own.
SLURMS_WORDS = frozenset({"Prolog error", "Epilog error"})
LIFTED = "lifted"  # the event that somebody else undrained a node that we had drained: no proof
NEAR_S = 180.0  # between our record of a drain and Slurm's time of it: queues, and two clocks


class DrainStanding(NamedTuple):
    """A drain of this node as Slurm has it."""

    flags: Collection[str]
    reason: str
    time: float | None


class Ours(NamedTuple):
    """The standing drain is ours: what it was for, and our own record of it, or a likeness."""

    reason: Reason
    event: Event


def ours(standing: DrainStanding, events: Sequence[Event]) -> Ours | None:
    """Return our own drain; None: somebody else made it, or edited its reason.

    A drain that Slurm made in our place is recognised by our record of the gate's exit code 1. If
    Slurm has rebooted the node since, its time of the drain is that of the reboot. From 24.11
    on, without slurmdbd, a reason outlives its drain, with its time, and Slurm's next drain keeps
    it: a reason older than an undrain in the history belongs to the drain that was lifted.
    """
    if "DRAIN" not in standing.flags or not standing.reason:
        return None
    drains = [event for event in events if event.kind == "drain"]
    text, rebooted = without_reboot(standing.reason)
    reason = parse_reason(text)
    if reason is not None:
        same = [e for e in drains if parse_reason(str(e.data.get("reason", ""))) == reason]
        likeness = Event(standing.time or 0.0, "drain", "", {"reason": text})
        mine = _near(same, standing.time, rebooted) or likeness
        return None if mine.time and _lifted(mine, events) else Ours(reason, mine)
    if text in SLURMS_WORDS:
        near = _near([e for e in drains if e.data.get("as") == text], standing.time, rebooted)
        asked = parse_reason(str(near.data.get("reason", ""))) if near else None
        if near and asked and not _lifted(near, events):
            return Ours(asked, near)
    return None


def lifted_by_others(
    flags: Collection[str], events: Iterable[Event], running: str = ""
) -> Event | None:
    """Find our record of a drain that no longer stands although no undrain is recorded.

    ``events``: read before the node's ``flags``, so that no drain is newer than these.
    """
    known = (event for event in events if event.kind in ("drain", "undrain", LIFTED))
    last = newest(known, running)
    if last is None or last.kind != "drain" or not last.data.get("placed") or "DRAIN" in flags:
        return None
    return last


def _lifted(drained: Event, events: Iterable[Event]) -> bool:
    ends = ("undrain", LIFTED)
    return any(event.kind in ends for event in since(events, drained))


def _near(drains: Iterable[Event], time: float | None, rebooted: bool) -> Event | None:
    """Our last record of the drain that Slurm dates so; long ago if it was rebooted since."""
    if time is None:
        return None
    found = [
        event
        for event in drains
        if abs(event.time - time) <= NEAR_S or (rebooted and event.time < time)
    ]
    return max(found, key=lambda event: event.time, default=None)


def why_not(
    standing: DrainStanding,
    mine: Ours,
    events: Sequence[Event],
    boot: str,
    booted: float,
    places: Mapping[str, str],
    acquitted: bool = False,
) -> str:
    """The reason to keep the drain although all checks pass; "" if it may be taken back.

    ``booted``: wall clock of the running boot; ``places``: PCI addresses by "gpu0", …
    ``acquitted``: the drain rests on nothing but reports that were withdrawn.
    """
    other = sorted(set(standing.flags) - HARMLESS)
    if other:
        return f"the node is also {'+'.join(other)}"
    # "base": the action was made "service" because the finding had come back too often.
    if acquitted or (mine.event.data.get("base") and settled(mine.event, events)):
        return ""
    device = mine.reason.device
    gpu = places.get(device, device)
    return cured(mine.reason.action, gpu, mine.event, events, boot, booted)
