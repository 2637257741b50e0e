"""The messages of NVIDIA's driver as events: those of one incident together, each one once. Pure.

A reset of a GPU leaves no line of its own in the log; see state.py for how one is noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from health.node.system import Event, LogRecord
from health.nvidia.xid_lines import DriverMessage, caused_by, lines, parse, recovery

# Messages with no more than this much silence between them are one incident: NVIDIA's own
# definition of a burst of Xids (docs.nvidia.com/fleet-intel/user-guide/xid-bursts).
BURST_S = 180.0
TEXT_LIMIT = 240  # characters of a message that an event keeps
KINDS = frozenset({"xid", "sxid", "lost", "driver"})


def events_from_log(
    records: Sequence[LogRecord], boot: str, now: float, uptime: float
) -> list[Event]:
    """The driver's messages as events, oldest first; equal ones of one incident are one event.

    ``data``: gpu, code, ``at`` and ``last`` (first and last, seconds since boot), count, text;
    "unit" (nvswitch3, GPU-I:05) and "form" ("bus", "init") where there is one. ``now`` and
    ``uptime`` are of the same moment.
    """
    open_now: dict[tuple[str, str, int, str], dict[str, Any]] = {}
    found: list[tuple[str, dict[str, Any]]] = []
    for record, line in lines(records):
        if line.kind == "driver":
            open_now.clear()  # later messages are of another load of the driver
        detail = _same(line)
        if detail is None:
            continue
        key = (line.kind, line.gpu, line.code, detail)
        data = open_now.get(key)
        if data is not None and record.time - data["last"] <= BURST_S:
            data["last"] = max(record.time, data["last"])
            data["count"] += 1
            continue
        data = {"gpu": line.gpu, "code": line.code, "at": record.time, "last": record.time}
        data |= {"count": 1, "text": record.text[:TEXT_LIMIT]}
        if line.unit:
            data["unit"] = line.unit
        if line.kind == "lost":
            data["form"] = line.message
        open_now[key] = data
        found.append((line.kind, data))
    booted = now - uptime
    return [Event(booted + data["at"], kind, boot, data) for kind, data in found]


def _same(line: DriverMessage) -> str | None:
    """The key that tells messages of one code apart; None: a continuation of another message."""
    if line.kind == "sxid":
        word = line.message[:9].lower()
        if word.startswith(("fatal", "non-fatal", "correctab")):
            return word
        return None  # "Severity 1 Engine instance …" and "Data {…}" follow the message itself
    if line.kind == "lost":
        return line.message
    if line.kind == "xid" and line.code == 154:
        return str(recovery(line.message))
    if line.kind == "xid" and line.code == 45:
        return str(bool(caused_by(line.message)))
    if line.kind == "xid" and (line.code == 74 or 144 <= line.code <= 150):
        return _same_link(line)
    return ""


def _same_link(line: DriverMessage) -> str:
    from health.nvidia import nvlink5  # not needed on a healthy node

    if line.code == 74:
        link4 = nvlink5.read74(line.message)
        return f"{link4.link} {link4.reset}" if link4 else ""
    link5 = nvlink5.read(line.code, line.message)
    return f"{link5.unit} {link5.link} {link5.reset}" if link5 else ""


def number(event: Event, key: str) -> float:
    """A number of the event's data; 0 for anything else that may stand in a file."""
    value = event.data.get(key, 0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0
    return value if abs(value) < 1e15 else 0  # also false for nan


def word(event: Event, key: str) -> str:
    """A string of the event's data; empty for anything else."""
    value = event.data.get(key, "")
    return value if isinstance(value, str) else ""


def end(event: Event) -> float:
    """Wall clock of the last message of an event."""
    return event.time + max(0.0, number(event, "last") - number(event, "at"))


def _key(event: Event) -> tuple[str, str, str, float, str]:
    place = word(event, "gpu")
    line = parse(word(event, "text"))
    same = (_same(line) or "") if line else ""
    return event.boot, event.kind, place, number(event, "code"), same


class _Known:
    """The incidents of a history, to tell if a log reports the same ones."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._spans: dict[tuple[str, str, str, float, str], list[tuple[float, float]]] = {}
        self._loads: dict[str, list[float]] = {}
        for event in events:
            if event.kind == "driver":
                self._loads.setdefault(event.boot, []).append(number(event, "at"))

    def add(self, event: Event) -> None:
        self._spans.setdefault(_key(event), []).append(_span(event))

    def has(self, event: Event) -> bool:
        return any(self.same(event.boot, _span(event), s) for s in self._spans.get(_key(event), ()))

    def same(self, boot: str, one: tuple[float, float], other: tuple[float, float]) -> bool:
        """True if two spans of equal messages are one incident.

        Their ends may differ: a log's beginning leaves the buffer. A load of the driver between
        them makes them two.
        """
        begin, end = min(one[1], other[1]), max(one[0], other[0])
        if end - begin > BURST_S:
            return False
        return not any(begin < load <= end for load in self._loads.get(boot, ()))


def _span(event: Event) -> tuple[float, float]:
    first = number(event, "at")
    return first, max(first, number(event, "last"))


def fresh(history: Iterable[Event], events: Iterable[Event]) -> list[Event]:
    """The events of a log that the history lacks, to be written to it.

    An incident that is read again is not fresh, even if its beginning has left the kernel's buffer
    meanwhile.
    """
    old, new = [event for event in history if event.kind in KINDS], list(events)
    known = _Known([*old, *new])
    for event in old:
        known.add(event)
    out = []
    for event in new:
        if not known.has(event):
            out.append(event)
        known.add(event)
    return out


def merge(history: Iterable[Event], events: Iterable[Event]) -> list[Event]:
    """History and log together, every incident once: what the history lacks stands after it.

    Of an incident in both, the count and the last time are the higher ones.
    """
    old, new = list(history), list(events)
    added = fresh(old, new)
    ids = {id(event) for event in added}
    again: dict[tuple[str, str, str, float, str], list[Event]] = {}
    for event in new:
        if id(event) not in ids:
            again.setdefault(_key(event), []).append(event)
    if again:
        known = _Known([*old, *new])
        old = [_fuller(event, again, known) for event in old]
    return [*old, *added]


def _fuller(
    event: Event, again: dict[tuple[str, str, str, float, str], list[Event]], known: _Known
) -> Event:
    """The event with what a later look at the same incident added to it."""
    if event.kind not in KINDS:
        return event
    for other in again.get(_key(event), ()):
        if known.same(event.boot, _span(event), _span(other)):
            more = {"last": max(_span(event)[1], _span(other)[1])}
            more["count"] = max(number(event, "count"), number(other, "count"))
            event = event._replace(data={**event.data, **more})
    return event
