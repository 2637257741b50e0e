"""Error counters of nodes that have grown, as an incident shows them (pure).

They are evidence for people and name the link or the device. No rule decides by them: a healthy
link has errors too, and a node that dies makes its neighbours' counters grow.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from robust_slurm.error_counters import weight

MOST = 20  # lines of an incident
OF_NODE = 64  # lines of an event


@dataclass(frozen=True, slots=True)
class NodeGrowth:
    """The growth of a node's counters since its agent began, now and as it was last shown."""

    node: str
    now: Mapping[str, int]
    shown: Mapping[str, int]


def lines(nodes: Sequence[NodeGrowth], suspects: Collection[str] = ()) -> tuple[str, ...]:
    """One line for each counter that has grown since it was shown: suspects' first, by weight."""
    grown = [
        (one.node not in suspects, weight(name), -more, one.node, name, one.now[name])
        for one in nodes
        for name, more in _more(one).items()
    ]
    left = len(grown) - MOST
    out = [
        f"{node}: {_line(name, -more, total)}"
        for _, _, more, node, name, total in heapq.nsmallest(MOST, grown)
    ]
    return (*out, f"and {left} more counters") if left > 0 else tuple(out)


def news(one: NodeGrowth) -> list[str]:
    """Return the lines of one node, for an event that names the node itself."""
    grown = [(weight(name), -more, name, one.now[name]) for name, more in _more(one).items()]
    return [_line(name, -more, total) for _, more, name, total in heapq.nsmallest(OF_NODE, grown)]


def _more(one: NodeGrowth) -> dict[str, int]:
    more = {name: count - one.shown.get(name, 0) for name, count in one.now.items()}
    return {name: count for name, count in more.items() if count > 0}


def _line(name: str, more: int, total: int) -> str:
    if more == total:
        return f"{name} +{total} since robust-task began there"
    return f"{name} +{more} since it was last shown, +{total} since robust-task began there"
