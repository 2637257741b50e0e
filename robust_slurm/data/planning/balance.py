"""Balance: equal cost for all data-parallel ranks, and as far as possible for their rows (pure).

``into_rows`` is greedy (longest processing time first) with rows of limited length;
``into_groups`` is Karmarkar and Karp's differencing for groups of equally many samples.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


class Packed(NamedTuple):
    """Indices of items by share and row, and of those that found no place, in the given order."""

    rows: list[list[list[int]]]
    left: list[int]


def into_rows(
    tokens: Sequence[int],
    costs: Sequence[float],
    first: int,
    shares: int,
    rows: int,
    capacity: int,
) -> Packed:
    """Pack items into ``rows`` rows of ``capacity`` tokens for each of ``shares`` shares.

    The ``first`` items are placed before all others, in their order; then the dearest first. An
    item goes to the share that would be cheapest in the end: its cost so far, and that of the
    room that it has left, at the mean cost of the tokens that are still to be placed. (By the
    cost so far alone, a share with few, dear items gets most of the small ones as well, since
    it has the most room at the end.) Then to the row of that share, by the same rule. The last
    items go to shares that have none yet: a rank without a sample would have no arrays.
    """
    order = [*range(first), *sorted(range(first, len(tokens)), key=costs.__getitem__, reverse=True)]
    if shares == 1:
        return _into_rows_of_one(tokens, costs, order, rows, capacity)
    import numpy as np

    rest_tokens, rest_cost = sum(tokens), math.fsum(costs)  # sum() differs by Python's version
    cost = [[0.0] * rows for _ in range(shares)]
    room = [[capacity] * rows for _ in range(shares)]
    share_cost, share_room = np.zeros(shares), np.full(shares, rows * capacity)
    widest = np.full(shares, capacity)
    packed: list[list[list[int]]] = [[[] for _ in range(rows)] for _ in range(shares)]
    left: list[int] = []
    bare = set(range(shares))  # without an item
    for done, item in enumerate(order):
        length, price = tokens[item], costs[item]
        rest_tokens -= length
        rest_cost = max(0.0, rest_cost - price)
        rate = rest_cost / rest_tokens if rest_tokens else 0.0
        ends = np.where(widest >= length, share_cost + rate * share_room, np.inf)
        share = int(ends.argmin())
        if len(order) - done <= len(bare) and share not in bare:
            share = min(bare)
        bare.discard(share)
        if widest[share] < length:
            left.append(item)
            continue
        row = _cheapest(cost[share], room[share], length, rate)
        cost[share][row] += price
        room[share][row] -= length
        share_cost[share] += price
        share_room[share] -= length
        widest[share] = max(room[share])
        packed[share][row].append(item)
    return Packed(packed, sorted(left))


def _into_rows_of_one(
    tokens: Sequence[int],
    costs: Sequence[float],
    order: Sequence[int],
    rows: int,
    capacity: int,
) -> Packed:
    """Pack items, in this order, into the rows of a single share."""
    rest_tokens, rest_cost = sum(tokens), math.fsum(costs)
    cost, room = [0.0] * rows, [capacity] * rows
    packed: list[list[int]] = [[] for _ in range(rows)]
    left: list[int] = []
    for item in order:
        length, price = tokens[item], costs[item]
        rest_tokens -= length
        rest_cost = max(0.0, rest_cost - price)
        row = _cheapest(cost, room, length, rest_cost / rest_tokens if rest_tokens else 0.0)
        if row < 0:
            left.append(item)
            continue
        cost[row] += price
        room[row] -= length
        packed[row].append(item)
    return Packed([packed], sorted(left))


def _cheapest(cost: Sequence[float], room: Sequence[int], length: int, rate: float) -> int:
    """Return the row with room for ``length`` tokens that would be cheapest in the end, the first
    of several; -1: none has room."""
    row, least = -1, 0.0
    for at, left in enumerate(room):
        if left >= length:
            end = cost[at] + rate * left
            if end < least or row < 0:
                row, least = at, end
    return row


def into_groups(costs: Sequence[float], groups: int) -> list[list[int]]:
    """Divide items into ``groups`` of equally many; indices by group. ``groups`` divides them.

    Karmarkar-Karp with balanced counts: the items by cost, ``groups`` at a time, are partial
    partitions; the two with the largest differences are merged, the dear end of one with the
    cheap end of the other, until one is left.
    """
    if groups == 1:
        return [list(range(len(costs)))]
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for number, start in enumerate(range(0, len(order), groups)):
        parts = [(float(costs[i]), [i]) for i in order[start : start + groups]]
        heap.append((parts[-1][0] - parts[0][0], number, parts))
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, two = heapq.heappop(heap)
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(one, reversed(two))]  # noqa: B905
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], count, merged))
        count += 1
    if not heap:
        return [[] for _ in range(groups)]
    return sorted(sorted(members) for _, members in heap[0][2])
