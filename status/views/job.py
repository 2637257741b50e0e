"""One job on a screen: its incidents in short rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from robust_slurm.state_dir.records import IncidentRecord
from status.views.overview import Line, duration, layout, short_clock
from status.wording import lost


def short_incidents(found: Sequence[IncidentRecord], width: int) -> list[Line]:
    """A row for each incident: what, whom it blames, what was done, and what it took."""
    heads = ("#", "TIME", "SYMPTOM", "CAUSE", "NODES", "ACTION", "OUTCOME", "TOOK", "STEPS LOST")
    table = [heads, *(_row(number, one) for number, one in enumerate(found, 1))]
    less = ("ACTION", "OUTCOME", "STEPS LOST")
    keep = [heads.index(head) for head in heads if head not in less]
    first, *rest = layout(table, width, keep)
    return [Line(first, "bold"), *(Line(text) for text in rest)]


def _row(number: int, one: IncidentRecord) -> tuple[str, ...]:
    swaps = ", ".join(f"{old}→{new}" for old, new in one.swaps)
    sized = " {}→{}".format(*one.resized) if one.resized else ""
    return (
        str(number),
        short_clock(one.time),
        one.symptom.replace("_", " "),
        one.cause,
        swaps or ",".join(one.suspects),
        one.action.replace("_", " ") + sized,
        one.outcome,
        duration(max(0.0, one.phases.get("total", 0.0))),
        lost(one),
    )
