"""Error counters of nodes that have grown, as an incident shows them (pure).

They are evidence for people and name the link, the GPU or the device. No rule decides by them: a
healthy link has errors too, and a node that dies makes its neighbours' counters grow.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

MOST = 20  # lines of an incident


@dataclass(frozen=True, slots=True)
class Counted:
    """The growth of a node's counters since the step began, now and as it was last shown."""

    node: str
    now: Mapping[str, int]
    shown: Mapping[str, int]


def lines(nodes: Sequence[Counted], suspects: Collection[str] = ()) -> tuple[str, ...]:
    """One line for each counter that grew since it was last shown, the suspects' first."""
    grown = [
        (one.node not in suspects, -(count - one.shown.get(name, 0)), one.node, name, count)
        for one in nodes
        for name, count in one.now.items()
        if count > one.shown.get(name, 0)
    ]
    out = [_line(node, name, -more, total) for _, more, node, name, total in sorted(grown)]
    left = len(out) - MOST
    return (*out[:MOST], f"and {left} more counters") if left > 0 else tuple(out)


def _line(node: str, name: str, more: int, total: int) -> str:
    if more == total:
        return f"{node}: {name} +{total} since the step began"
    return f"{node}: {name} +{more} since an earlier incident, +{total} since the step began"
