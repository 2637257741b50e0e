"""`robust-health status`: the drains of a node in the last day, and what keeps them. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from health.gate.holds import DAY, HoldRules, drains, held_until, settled
from health.history.order import since
from health.node.system import Event
from robust_slurm.drain_reason import parse_reason


def lines(node: str, events: Sequence[Event], now: float, rules: HoldRules) -> list[str]:
    """One line for each drain of the last day and, until it was lifted, what it waits for."""
    lately = [e for e in events if e.kind == "drain" and now - DAY < e.time <= now]
    if not lately:
        return [f"{node}: not drained by robust-slurm within 24 h"]
    return [f"{node}: {_line(event, events, now, rules)}" for event in lately]


def _line(drained: Event, events: Iterable[Event], now: float, rules: HoldRules) -> str:
    text = str(drained.data.get("reason", ""))
    reason = parse_reason(text)
    known = list(events)
    head = f"{_clock(drained.time)} drained, {text}"
    lifted = [e.time for e in since(known, drained) if e.kind == "undrain"]
    if lifted:
        return f"{head}; undrained {_clock(min(lifted))}"
    if reason is None:
        return head
    times = len(drains(reason.check, known, drained.time))
    head += f"; drain {times} for {reason.check} within 24 h"
    if drained.data.get("base"):
        return f"{head}: until `robust-health repaired`, or a burn-in that passes"
    until = held_until(reason, drained, known, rules)
    if until > now and not settled(drained, known):
        return f"{head}: held down until {_clock(until)}"
    return f"{head}: until the checks pass and the action ({reason.action}) is confirmed"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
