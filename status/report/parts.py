"""The incidents of a page in words, and its map of nodes and ranks. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from robust_slurm.state_dir.progress import JobRun
from robust_slurm.state_dir.records import IncidentRecord
from status.accounts.timeline import JobAccount
from status.views.overview import clock
from status.views.why import paragraphs

MOST_INCIDENTS = 200  # on the page, the newest


class Told(NamedTuple):
    number: int
    clock: str
    head: str
    outcome: str
    good: bool
    text: str
    lines: tuple[tuple[str, str], ...]


class WorldPlace(NamedTuple):
    """A place of the world: its ranks, the nodes that held them, and the restarts between."""

    number: int
    ranks: str
    before: str
    after: str
    history: str
    changed: bool


def incidents_told(job: JobAccount, log: str, recovering: bool) -> tuple[Told, ...]:
    texts = paragraphs(job, log, recovering)
    found = []
    for number, one in enumerate(job.incidents):
        lines: list[tuple[str, str]] = []
        for name in ("evidence", "tests", "counters", "amended", "restored"):
            lines += [(name, line) for line in getattr(one, name)]
        what = one.symptom.replace("_", " ")
        where = f" on {', '.join(one.suspects[:4])}" if one.suspects else ""
        good = one.outcome in ("recovered", "requeued")
        text = texts[number].partition(": ")[2]
        if not text.startswith((*one.suspects, *(old for old, _ in one.swaps))):
            text = text[:1].upper() + text[1:]
        found.append(
            Told(number + 1, clock(one.time), f"{what}{where}", one.outcome, good, text,
                 tuple(lines))
        )  # fmt: skip
    shown = found[-MOST_INCIDENTS:]
    if recovering and len(texts) > len(job.incidents):
        shown.append(Told(0, "", "now", "recovering", False, texts[-1], ()))
    return tuple(shown)


def places_of(
    runs: Sequence[JobRun], incidents: Sequence[IncidentRecord]
) -> tuple[WorldPlace, ...]:
    """The places of the newest run's world, at its beginning and now."""
    placings = runs[-1].placings if runs else []
    first: dict[int, tuple[str, str]] = {}
    now: dict[int, tuple[str, str]] = {}
    trail: dict[int, list[str]] = {}
    swapped = {(old, new): n for n, i in enumerate(incidents, 1) for old, new in i.swaps}
    for placing in placings:
        for place, (node, ranks) in placing.places.items():
            before = now.get(place)
            if before is not None and before[0] != node:
                number = swapped.get((before[0], node))
                by = f"restart {number}" if number else "a restart"
                trail.setdefault(place, []).append(f"{node} after {by}")
            first.setdefault(place, (node, ranks))
            now[place] = (node, ranks)
    return tuple(
        WorldPlace(
            place,
            now[place][1],
            first[place][0],
            now[place][0],
            "; ".join(trail.get(place, [])),
            first[place][0] != now[place][0] or place in trail,
        )
        for place in sorted(first)
    )
