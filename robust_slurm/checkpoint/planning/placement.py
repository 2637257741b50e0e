"""Choose for each rank the store that keeps the replica of its snapshot. Pure.

A replica is worth something only where the loss that takes the owner does not take it too. What is
lost together: a node; a leaf switch; a parallel group, by which is meant all nodes that a
data-parallel, pipeline or tensor group runs on (such groups are evicted whole). The rule is
ByteRobust's (no common group, another machine) with the switch added, in this order:

1. ``groups+switch``  no common group, another node, another leaf switch
2. ``groups``         no common group, another node
3. ``switch``         another node, another leaf switch (the best with one parallel dimension)
4. ``node``           another node
5. ``none``           there is one node only: nobody holds a replica

Levels 1 and 2 are tried first with no group that has any ranks on both nodes, then with no group
that has both ranks. The level is what every rank reaches. Every rank holds one replica, or the
fewest that can be where more than half of the ranks run on one node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod

# Things that an owner and a holder share; SPAN: some group has ranks on both their nodes.
NODE, GROUP, SPAN, LEAF = 8, 4, 2, 1
_TRIES = (
    NODE | GROUP | SPAN | LEAF,
    NODE | GROUP | SPAN,
    NODE | GROUP | LEAF,
    NODE | GROUP,
    NODE | LEAF,
    NODE,
)
# Both bound the time for large worlds; in one of a few hundred ranks the search is exhaustive.
_COMPARED = 200_000  # ranks, over all candidates
_REPAIRED = 200_000  # pairs looked at, for one of _TRIES


Holders = tuple[int | None, ...]
"""Rank whose store holds the replica, by owner; None: there is none."""


def place(
    nodes: Sequence[str], mesh: Mapping[str, int], leaf: Mapping[str, str] | None = None
) -> Holders:
    """Choose a holder for every rank.

    ``nodes``: node of each rank. ``mesh``: size of each parallel dimension in DeviceMesh order (the
    last varies fastest); counts as none if its product is not the number of ranks. ``leaf``:
    node → leaf switch. The same input gives the same result everywhere.
    """
    world = RankLayout(nodes, mesh, leaf or {})
    if world.node_count < 2:
        return (None,) * world.size
    largest = max(Counter(world.node).values())
    return tuple(_lopsided(world) if 2 * largest > world.size else _permutation(world))


class RankLayout:
    """Nodes, switches and groups of the ranks, as numbers."""

    def __init__(
        self, nodes: Sequence[str], mesh: Mapping[str, int], leaf: Mapping[str, str]
    ) -> None:
        self.size = len(nodes)
        numbers = {name: i for i, name in enumerate(dict.fromkeys(nodes))}
        self.node = [numbers[name] for name in nodes]
        self.node_count = len(numbers)
        switches = [leaf.get(name, "") for name in numbers]
        # Nodes that the topology does not know count as one more switch, together.
        self.leaf = switches if len(set(switches)) > 1 else list(numbers)
        self.sizes = dimensions(mesh, self.size)
        ids = [group_ids(self.sizes, d) for d in range(len(self.sizes))]
        self.groups = ids if len(ids) > 1 else []  # with one, everybody shares its only group
        self._span = self._spans()
        self._pairs: dict[tuple[int, int], int] = {}

    def _spans(self) -> list[int]:
        """For each node the nodes that it shares any group with, as bits.

        A group that runs on all nodes does not count: its loss is the loss of the job.
        """
        spans = [0] * self.node_count
        everything = (1 << self.node_count) - 1
        for ids in self.groups:
            covers = group_nodes(ids, self.node)
            for number, group in zip(self.node, ids, strict=True):
                if covers[group] != everything:
                    spans[number] |= covers[group]
        return spans

    def common(self, owner: int, holder: int) -> int:
        """Return as flags what the two ranks have in common."""
        pair = self.node[owner], self.node[holder]
        flags = self._pairs.get(pair)
        if flags is None:
            a, b = pair
            flags = NODE * (a == b) | SPAN * (self._span[a] >> b & 1)
            flags |= LEAF * (self.leaf[a] == self.leaf[b])
            self._pairs[pair] = flags
        for ids in self.groups:
            if ids[owner] == ids[holder]:
                return flags | GROUP
        return flags


def dimensions(mesh: Mapping[str, int], world: int) -> list[int]:
    """Sizes above 1, in order; none for a mesh that is not this world's."""
    sizes = list(mesh.values())
    if min(sizes, default=0) < 1 or prod(sizes) != world:
        return []
    return [size for size in sizes if size > 1]


def group_ids(sizes: Sequence[int], dimension: int) -> list[int]:
    """For each rank its group along a dimension, named by the group's first rank.

    Ranks of a group are equal in all other coordinates.
    """
    stride = prod(sizes[dimension + 1 :])
    return [r - (r // stride % sizes[dimension]) * stride for r in range(prod(sizes))]


def group_nodes(ids: Sequence[int], node: Sequence[int]) -> dict[int, int]:
    """Group → the nodes that it runs on, as bits."""
    covers: dict[int, int] = {}
    for number, group in zip(node, ids, strict=True):
        covers[group] = covers.get(group, 0) | 1 << number
    return covers


def _permutation(world: RankLayout) -> list[int]:
    """Holders, each of one replica, at the first level of _TRIES that all ranks can reach."""
    starts: dict[int, tuple[tuple[int, ...], list[int]]] = {}
    limit = max(8, _COMPARED // world.size)
    for count, holders in enumerate(_candidates(world)):
        if count == limit:
            break
        flags = Counter(map(world.common, range(world.size), holders))
        if set(flags) == {0}:
            return holders
        bits = [sum(n for f, n in flags.items() if f & b) for b in (NODE, GROUP, SPAN, LEAF)]
        for mask in _TRIES:
            bad = sum(n for f, n in flags.items() if f & mask)
            score = (bad, *bits)
            if mask not in starts or score < starts[mask][0]:
                starts[mask] = score, holders
    for mask in _TRIES:
        if mask & LEAF and not _divisible(world):
            continue
        holders = list(starts[mask][1])
        if _repair(world, holders, mask):
            return holders
    return _by_node(world)  # only where the budget ended: always another node


def _divisible(world: RankLayout) -> bool:
    """True if no leaf switch has more than half of the ranks: else they cannot all leave it."""
    counts = Counter(world.leaf[number] for number in world.node)
    return 2 * max(counts.values()) <= world.size


def _candidates(world: RankLayout) -> Iterator[list[int]]:
    """Permutations that spread well in regular worlds, the preferred first.

    Shifts of mesh coordinates: half of the slowest dimension and the neighbour in the next one
    (which gives ByteRobust's ranks 8,9 ↔ 2,3 of TP2 PP4 DP2 in both usual orders), then others.
    Mostly both ends hold each other's, so that the fewest pairs of nodes are fatal.
    """
    sizes = world.sizes
    moves: list[list[tuple[str, int]]] = []
    for d, size in enumerate(sizes):
        half, neighbour = ("shift", size // 2), ("swap", 1)
        options = [half] if size % 2 or size == 2 else [half, neighbour]
        if d:
            options.reverse()
        moves.append([("stay", 0), *options])
    ranked = sorted(
        product(*(range(len(options)) for options in moves)),
        key=lambda c: (c.count(0) != len(c) - 2, -len(c) + c.count(0), [x or 9 for x in c]),
    )
    ranks = range(world.size)
    for choice in ranked:
        if not any(choice):
            continue
        target = [0] * world.size
        stride = 1
        for d in reversed(range(len(sizes))):
            size, (name, by) = sizes[d], moves[d][choice[d]]
            to = [(c ^ 1 if name == "swap" else (c + by) % size) * stride for c in range(size)]
            target = [at + to[r // stride % size] for r, at in zip(ranks, target, strict=True)]
            stride *= size
        yield target
    yield _by_node(world)


def _by_node(world: RankLayout) -> list[int]:
    """Half way round the ranks in order of switch and node.

    Always another node (or switch) where none has more than half of the ranks.
    """
    ranks = range(world.size)
    first: dict[str, int] = {}
    for r in ranks:
        first.setdefault(world.leaf[world.node[r]], r)
    order = sorted(ranks, key=lambda r: (first[world.leaf[world.node[r]]], world.node[r], r))
    half = world.size // 2
    holders = [0] * world.size
    for i, owner in enumerate(order):
        holders[owner] = order[(i + half) % world.size]
    return holders


def _repair(world: RankLayout, holders: list[int], mask: int) -> bool:
    """Change ``holders`` until no pair has anything of ``mask`` in common.

    Augmenting paths of bipartite matching, breadth first. False if there is no such permutation,
    or if the search became too long; ``holders`` is no permutation then.
    """
    size = world.size
    bad = [o for o in range(size) if world.common(o, holders[o]) & mask]
    owner_of = {h: o for o, h in enumerate(holders)}
    free = dict.fromkeys(holders[o] for o in bad)
    looked = 0

    def ending(owner: int) -> int | None:
        nonlocal looked
        for holder in free:
            looked += 1
            if not world.common(owner, holder) & mask:
                return holder
        return None

    for start in bad:
        came: dict[int, int] = {}  # holder → owner that would take it
        queue = deque([start])
        last, end = start, ending(start)
        while queue and end is None and looked <= _REPAIRED:
            owner = queue.popleft()
            for holder in range(size):
                looked += 1
                if looked > _REPAIRED:
                    break
                if holder in came or holder in free or world.common(owner, holder) & mask:
                    continue
                came[holder] = owner
                last = owner_of[holder]
                end = ending(last)
                if end is not None:
                    break
                queue.append(last)
        if end is None or looked > _REPAIRED:
            return False
        del free[end]
        while True:
            given_up = holders[last]
            holders[last], owner_of[end] = end, last
            if last == start:
                break
            last, end = came[given_up], given_up
    return True


def _lopsided(world: RankLayout) -> list[int]:
    """Holders where one node has more than half of the ranks: those elsewhere hold several."""
    crowded = Counter(world.node).most_common(1)[0][0]
    inside = [r for r in range(world.size) if world.node[r] == crowded]
    outside = [r for r in range(world.size) if world.node[r] != crowded]
    holders = [0] * world.size
    for owners, takers in ((inside, outside), (outside, inside)):
        load = Counter(dict.fromkeys(takers, 0))
        for owner in owners:
            least = min(load.values())
            near = [t for t in takers if load[t] == least]
            holders[owner] = min(near, key=lambda t: world.common(owner, t))
            load[holders[owner]] += 1
    return holders
