"""The node gate's published history of a node, ``<state_dir>/nodes/<node>.jsonl``, without trust.

The gate writes it (``health/history/events.py``); only the kinds that tell of a suspicion are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_slurm.state_dir.files import content
from robust_slurm.state_dir.ledger import WITHDRAWN
from robust_slurm.state_dir.records import MAX_TEXT, clean, decode, number, whole, words

NODES = "nodes"
FLEET = ("drains", "strikes")  # files there that are of no single node
READ_BYTES = 8 << 20  # the newest end of the file
LINE_BYTES = 64 << 10
KINDS = (
    *("accusation", "rejected", "strike", "withdrawn", "drain", "undrain"),
    *("repaired", "active-run", "burn-in"),
)
_MARKS = tuple(f'"kind":"{kind}"'.encode() for kind in KINDS)


@dataclass(frozen=True)
class NodeEvent:
    """One event. ``report``: the incident id of the report that it is about, "" for none."""

    time: float
    kind: str
    job_id: int = 0
    uid: int = -1
    report: str = ""
    rule: str = ""
    check: str = ""  # of a drain; of a report: its symptom
    cls: str = ""  # of a drain: node, user or tool
    result: str = ""
    reason: str = ""
    why: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    seen: float | None = None  # time of the report
    told: str = ""  # in words: evidence of a drain, answer of a test, note of a person
    by: str = ""
    tested: bool = False  # tests of the site passed, besides the checks
    placed: bool = True
    reports: tuple[tuple[int, str], ...] = ()  # job and incident id of those behind a drain


def event_from(data: object, node: str) -> NodeEvent | None:
    """An event of this node; None for what is no event, or is none that tells of a suspicion."""
    if not isinstance(data, dict) or (when := number(data.get("time"))) is None:
        return None
    kind, of = data.get("kind"), data.get("data")
    if not isinstance(kind, str) or kind not in KINDS or not isinstance(of, dict):
        return None
    uid = whole(of.get("uid"))
    return NodeEvent(
        time=when,
        kind=kind,
        job_id=whole(of.get("job")) or 0,
        uid=-1 if uid is None else uid,
        report=report_of(of.get("name"), node),
        rule=clean(of.get("rule"), 40),
        check=clean(of.get("check"), 60),
        cls=clean(of.get("class"), 10),
        result=_result(kind, of),
        reason=clean(of.get("reason"), 200),
        why=words(of.get("why"), MAX_TEXT),
        said=words(of.get("said"), MAX_TEXT),
        seen=number(of.get("seen")),
        told=clean(of.get("evidence")) or clean(of.get("told")) or clean(of.get("note")),
        by=clean(of.get("by"), 60),
        tested=of.get("tested") is True,
        placed=of.get("placed") is not False,
        reports=tuple(_reports(of.get("reports"), node)),
    )


def _result(kind: str, of: Mapping[str, Any]) -> str:
    if kind == "burn-in":
        return "passed" if of.get("ok") is True else "failed"
    return clean(of.get("result"), 20)


def report_of(name: object, node: str) -> str:
    """The incident id in the name of a report's file, or of its withdrawal."""
    text = name if isinstance(name, str) else ""
    if not text.startswith(f"{node}.") or not text.endswith(".json"):
        return ""
    end = WITHDRAWN if text.endswith(WITHDRAWN) else ".json"
    return clean(text.removeprefix(f"{node}.").removesuffix(end), 60)


def _reports(value: object, node: str) -> Iterator[tuple[int, str]]:
    for item in value[:50] if isinstance(value, list) else ():
        if isinstance(item, dict) and (report := report_of(item.get("name"), node)):
            yield whole(item.get("job")) or 0, report


def events_from(raw: bytes, node: str) -> list[NodeEvent]:
    """The events in a file's text, each line once, oldest first."""
    found: list[NodeEvent] = []
    for line in dict.fromkeys(raw.split(b"\n")):
        if len(line) > LINE_BYTES or not any(mark in line for mark in _MARKS):
            continue
        if (event := event_from(decode(line), node)) is not None:
            found.append(event)
    return sorted(found, key=lambda event: event.time)


def read_events(state_dir: Path, node: str) -> tuple[list[NodeEvent], list[str]]:
    """Return the gate's published events of a node (a name without "/"), and reading errors."""
    problems: list[str] = []
    raw = content(state_dir / NODES / f"{node}.jsonl", READ_BYTES, problems, tail=True)
    return events_from(raw or b"", node), problems


def published(state_dir: Path) -> list[str]:
    """The nodes of which the gate has published anything."""
    try:
        found = sorted((state_dir / NODES).glob("*.jsonl"))
    except OSError:
        return []
    return [path.stem for path in found if path.stem not in FLEET]
