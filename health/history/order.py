"""Order of a node's events that survives a clock which is set. Pure.

A history's lines stand in the order in which they were written. Within one boot that order counts
for events that are dated as they are written down; a message of the kernel is written later than it
came, so its time counts. All that has another boot's id is older than what has the running one's.
"""

from __future__ import annotations

from collections.abc import Iterable

from health.node.system import Event

DATED_AT_ONCE = frozenset({"drain", "undrain", "lifted", "repaired", "burn-in"})


def in_order(events: Iterable[Event]) -> list[Event]:
    """Sort by time, but leave the events of one boot in the order in which they were written."""
    newest: dict[str, float] = {}
    dated = []
    for event in events:
        time = max(event.time, newest.get(event.boot, 0.0)) if event.boot else event.time
        newest[event.boot] = time
        dated.append((time, event))
    return [event for _, event in sorted(dated, key=lambda each: each[0])]


def since(events: Iterable[Event], mark: Event, running: str = "") -> list[Event]:
    """Return the events after ``mark``, which is one of them or a likeness, in their order.

    ``running``: id of the running boot, where it is known.
    """
    known = list(events)
    at = max((place for place, event in enumerate(known) if event == mark), default=-1)

    def later(place: int, event: Event) -> bool:
        both = bool(event.boot and mark.boot)
        if both and event.boot == mark.boot and at >= 0 and event.kind in DATED_AT_ONCE:
            return place > at
        if both and event.boot != mark.boot and running in (event.boot, mark.boot):
            return event.boot == running
        return event.time > mark.time

    return [event for place, event in enumerate(known) if later(place, event)]


def newest(events: Iterable[Event], running: str = "") -> Event | None:
    """Return the last of events that are dated at once; None if there are none."""
    last: Event | None = None
    for event in events:
        if last is None or (event.boot and event.boot == last.boot):
            last = event
        elif event.boot and last.boot and running in (event.boot, last.boot):
            last = event if event.boot == running else last
        elif event.time >= last.time:
            last = event
    return last
