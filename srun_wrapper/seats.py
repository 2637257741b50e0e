"""Where each rank runs in the next epoch, as far as it can be known before (pure).

Usually a rank keeps its slot. But a torchrun with a dynamic rendezvous (c10d, etcd-v2) numbers its
nodes itself: it sorts them by (address, pid, id), the address being ``--local-addr`` or the host's
full name, each time anew. A node that takes the place of another then moves those behind it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from srun_wrapper.torchrun import sorts_nodes


class Seen(NamedTuple):
    """Where a rank was when its Checkpointer last introduced itself."""

    epoch: int
    place: int
    local: int
    node: str


def seats(
    command: Sequence[str],
    env: Mapping[str, str],
    names: Sequence[str],
    slots: Sequence[Sequence[int]],
    world: int,
    seen: Mapping[int, Seen],
) -> dict[int, tuple[int, int]]:
    """Rank → (place, local id of the slot). Ranks of which nothing is known are left out.

    ``names``: of the nodes that are in the places now; ``slots``: the slots' numbers by place.
    """
    if all(len(numbers) == 1 for numbers in slots) and sorts_nodes(command, env):
        sizes = _sizes(len(slots), world, seen)
        if sizes and _was_sorted(seen):
            order = sorted(range(len(names)), key=lambda place: names[place])
            places = [place for place in order for _ in range(sizes[place])]
            return {rank: (place, 0) for rank, place in enumerate(places)}
    known: dict[int, tuple[int, int]] = {}
    if world == sum(map(len, slots)):  # else torchrun starts them, and they tell by enrolling
        known = {
            rank: (place, local)
            for place, numbers in enumerate(slots)
            for local, rank in enumerate(numbers)
        }
    return known | {rank: (each.place, each.local) for rank, each in seen.items()}


def _sizes(places: int, world: int, seen: Mapping[int, Seen]) -> list[int]:
    """Ranks of each place; empty if that is not known."""
    if _complete(seen, world):
        counts = Counter(each.place for each in seen.values())
        return [counts[place] for place in range(places)]
    return [world // places] * places if world % places == 0 else []


def _was_sorted(seen: Mapping[int, Seen]) -> bool:
    """False if the last epoch's ranks did not follow the nodes' names: torchrun knows others."""
    if not _complete(seen, len(seen)):
        return True
    nodes = [seen[rank].node for rank in sorted(seen)]
    return nodes == sorted(nodes)


def _complete(seen: Mapping[int, Seen], world: int) -> bool:
    """All ranks, as they were at one time."""
    return len(seen) == world and len({each.epoch for each in seen.values()}) == 1
