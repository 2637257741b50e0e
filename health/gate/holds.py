"""Hold-downs: a drain stays although the checks pass again, longer after each recurrence. Pure.

An intermittent fault would otherwise drain and undrain its node all day, and hit a job each time.
Only drains that a passing re-check lifts are held down: the others require a proof.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from health.finding import ACTIONS
from health.history.order import since
from health.node.system import Event
from robust_slurm.drain_reason import Reason, parse_reason
from robust_slurm.text import counted

DAY = 86400.0  # seconds
SAME_S = 60.0  # in which prologs of jobs that start together may each record the drain


class HoldRules(NamedTuple):
    """``hold_down``: seconds after the first drain, 0: none; it doubles with each one more of the
    same finding within a day. ``hold_times``: so many mean service, 0: never."""

    hold_down: float = 600.0
    hold_times: int = 3


def drains(check: str, events: Iterable[Event], until: float) -> list[float]:
    """The times of the node's drains for this finding in the day up to ``until``, oldest first.

    Drains before a repair or a passed burn-in do not count. Records within SAME_S of each other are
    one drain, unless the node was undrained between them.
    """
    known = sorted((e for e in events if until - DAY < e.time <= until), key=lambda e: e.time)
    found: list[float] = []
    last = -SAME_S
    for event in known:
        if _settles(event):
            found.clear()
        if _settles(event) or event.kind == "undrain":
            last = -SAME_S
        elif event.kind == "drain" and _check(event) == check:
            if event.time - last >= SAME_S:
                found.append(event.time)
            last = event.time
    return found


def service(reason: Reason | None, events: Iterable[Event], now: float, rules: HoldRules) -> str:
    """The reason why a drain for ``reason`` made now needs service; "" if it does not.

    Only findings of class node do: users' leftovers and failures of our own tools need no repair of
    the node.
    """
    if reason is None or reason.cls != "node" or ACTIONS[reason.action].proof != "recheck":
        return ""
    own = Event(now, "drain", "", {"reason": reason.text})
    times = len(drains(reason.check, [*events, own], now))
    if rules.hold_times <= 0 or times < rules.hold_times:
        return ""
    return f"{counted(times, 'drain')} for {reason.check} within 24 h"


def held_until(reason: Reason, drained: Event, events: Iterable[Event], rules: HoldRules) -> float:
    """The wall clock before which the drain is not lifted; 0.0 for one that needs a proof."""
    if ACTIONS[reason.action].proof != "recheck" or rules.hold_down <= 0:
        return 0.0
    earlier = len(drains(reason.check, [*events, drained], drained.time)) - 1
    return drained.time + min(rules.hold_down * 2.0 ** min(earlier, 30), DAY)


def settled(drained: Event, events: Iterable[Event]) -> bool:
    """True if a person repaired the node, or a burn-in passed on it, since the drain."""
    return any(_settles(event) for event in since(events, drained))


def _settles(event: Event) -> bool:
    return event.kind == "repaired" or (event.kind == "burn-in" and event.data.get("ok") is True)


def _check(event: Event) -> str:
    reason = parse_reason(str(event.data.get("reason", "")))
    return reason.check if reason else ""
