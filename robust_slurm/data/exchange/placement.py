"""Pure: the placement of lanes, each on a node that reads it and another that is its shadow.

Nodes are named by their places in the job, 0 to n - 1. Each lane has an order of all places: the
first that is there reads it, the second is its shadow. The samples are right whatever the places:
a node reads any lane that it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LEAST = 3  # nodes: of two, both would read all lanes, as the owner or as the shadow
MOST = 512  # nodes: each talks to all others, and all ranks have the addresses in a variable
VARIABLE = "ROBUST_DATA_NODES"
"""In the ranks' environment: JSON, this node's place and all nodes' (address, port)."""


def numbered(lanes: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return each lane's number: lanes of one source are neighbours, so on different nodes."""
    return {lane: number for number, lane in enumerate(sorted(lanes))}


def preference(number: int, nodes: int) -> Iterator[int]:
    """Yield the places in the order in which they come into question for lane ``number``.

    Owners take turns. The lanes of one owner have all other nodes in turn as their second, so that
    its loss is shared by all.
    """
    owner, others = number % nodes, nodes - 1
    turn = number // nodes
    yield owner
    for step in range(others):
        yield (owner + 1 + (turn + step) % others) % nodes
