"""Lost nodes and the time nodes were watched, from the state directory. Pure parsing.

Any user may have written what is read here: it may have values of the wrong type, impossible times
and torn lines. Such a line is counted as bad and left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from robust_slurm.state_dir.records import Roster, clean, decode, number, stays, whole

DAY = 86400.0
SKEW_S = 3600.0  # by how much a clock may be ahead of ours
LONGEST_S = 400 * DAY  # a record of a longer run is not believed
_LIVING = ("active", "spare")
_NAME = 255


class Loss(NamedTuple):
    """Nodes that left at one moment. ``job`` 0: none; ``gate``: a drain, not a job's incident."""

    time: float
    nodes: tuple[str, ...]
    job: int
    gate: bool


class Span(NamedTuple):
    """A node's time in a job, from ``begin`` to ``end``."""

    node: str
    begin: float
    end: float


class RecordLines(NamedTuple):
    """A file's records; how many lines were none."""

    records: tuple[Mapping[str, Any], ...]
    bad: int


def lines(raw: bytes, now: float) -> RecordLines:
    """Return the JSON objects with a possible "time", in file order. A torn last line is bad."""
    found: list[Mapping[str, Any]] = []
    bad = 0
    *whole_lines, last = raw.split(b"\n")
    for line in whole_lines:
        if not line.strip():
            continue
        record = decode(line)
        when = number(record.get("time")) if isinstance(record, dict) else None
        if when is None or not 0.0 < when <= now + SKEW_S:
            bad += 1
        else:
            found.append(record)
    return RecordLines(tuple(found), bad + bool(last.strip()))


def incident(record: Mapping[str, Any], job: int) -> Loss | None:
    """Return the nodes that a job lost in an incident; None if it lost none.

    They are the nodes that were replaced, and those blamed but not replaced (none was left).
    After a warning, or with ``mode = observe``, a blamed node stays in the job unless it is lost.
    """
    if stays(str(record.get("outcome")), str(record.get("symptom"))):
        return None
    swaps = record.get("swaps")
    names = [
        pair[0]
        for pair in (swaps if isinstance(swaps, list) else ())
        if isinstance(pair, list | tuple) and pair
    ]
    suspects = record.get("suspects")
    if record.get("cause") == "node" and isinstance(suspects, list):
        names += suspects
    nodes = _names(names)
    return Loss(float(record["time"]), nodes, job, False) if nodes else None


def drain(record: Mapping[str, Any], node: str) -> Loss | None:
    """The node gate's drain of a bad node; None for anything else (also a tool's own trouble)."""
    data = record.get("data")
    if record.get("kind") != "drain" or not isinstance(data, dict) or data.get("class") != "node":
        return None
    return Loss(float(record["time"]), (node,), whole(data.get("job")) or 0, True)


def chronicle_spans(records: Iterable[Mapping[str, Any]], end: float) -> Iterator[Span]:
    """Yield every node's time in the epochs of events.jsonl; the last epoch lasts until ``end``.

    A node's time begins with the first epoch that lists it and ends with the failure before the
    first that does not. An epoch number that does not rise begins another run of the job
    (requeued): the run before ended with its last line.
    """
    since: dict[str, float] = {}
    epoch, last, failed = 0, 0.0, 0.0
    for record in sorted(records, key=lambda r: float(r["time"])):
        now = float(record["time"])
        if record.get("event") == "epoch":
            number_, nodes = whole(record.get("epoch")), record.get("nodes")
            if number_ is None or not isinstance(nodes, list):
                continue
            names = set(_names(nodes))
            again = number_ <= epoch
            for node in [n for n in since if again or n not in names]:
                yield Span(node, since.pop(node), last if again else failed or last)
            for node in names:
                since.setdefault(node, now)
            epoch, failed = number_, 0.0
        elif record.get("event") == "failure" and not failed:
            failed = now
        last = now
    for node, begin in since.items():
        yield Span(node, begin, max(end, last))


def roster_spans(roster: Roster) -> Iterator[Span]:
    """Yield the time of a step's nodes by its roster, which lacks when each joined or left."""
    if roster.started is not None:
        for member in roster.nodes:
            if member.role in _LIVING:
                yield Span(member.name, roster.started, roster.updated)


def believable(span: Span, now: float) -> bool:
    """Return whether a span's times are possible."""
    return 0.0 < span.begin <= span.end <= now + SKEW_S and span.end - span.begin <= LONGEST_S


def _names(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for value in values if (name := clean(value, _NAME))))
