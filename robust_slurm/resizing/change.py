"""A world of fewer nodes, and of all again: who leaves, and which number each rank gets (pure).

Whole replicas of the model leave. Those that stay keep their order and are numbered from 0 on
without a gap, so that the numbers of a node's ranks rise as they did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from robust_slurm.text import counted

from .shares import holder, holders_of_blocks, shares_of
from .stages import successors

Ranks = Sequence[Sequence[int]]
"""Rank numbers of each place."""


@dataclass(frozen=True, slots=True)
class Resize:
    """A change of the world's size."""

    places: tuple[int, ...]
    """The old place of each new one; -1: of a node that comes."""
    ranks: tuple[tuple[int, ...], ...]
    """The new rank numbers of each new place."""
    origin: Mapping[int, int]
    """New rank -> the old one whose state it goes on with."""
    anew: frozenset[int]
    """New ranks that did not exist before: they take over only what all ranks share."""
    old: int
    new: int
    left: tuple[tuple[int, ...], ...] = ()
    """Old places that leave, in sets that can come back only together."""


def replicas(world: int, groups: Collection[Sequence[int]]) -> list[frozenset[int]]:
    """Return the ranks of each replica. ``groups``: ranks that hold the same state.

    Raises ValueError if not every rank's state is another rank's as well.
    """
    ordered = [sorted(group) for group in groups]
    if sorted(rank for group in ordered for rank in group) != list(range(world)):
        raise ValueError("some ranks hold a state that no other rank holds")
    if len({len(group) for group in ordered}) != 1 or len(ordered[0]) < 2:
        raise ValueError("the ranks that hold the same state form groups of different sizes")
    return [frozenset(members) for members in zip(*ordered, strict=True)]


def fewer(
    ranks: Ranks, lost: Collection[int], groups: Collection[Sequence[int]], least: int
) -> Resize:
    """Return the world without these places. ``least``: nodes that must stay.

    Raises ValueError that says why there can be none.
    """
    world = sum(map(len, ranks))
    gone = {rank for place in lost for rank in ranks[place]}
    whole = replicas(world, groups)
    stay = sorted(rank for members in whole if not gone & members for rank in members)
    if not stay:
        raise ValueError("every replica of the model has a rank on a lost node")
    number = {rank: new for new, rank in enumerate(stay)}
    kept = [place for place, own in enumerate(ranks) if any(rank in number for rank in own)]
    if any(rank not in number for place in kept for rank in ranks[place]):
        raise ValueError("a node would keep only some of its ranks")
    if len(kept) < least:
        raise ValueError(f"{counted(len(kept), 'node')} would be left, min_nodes is {least}")
    return Resize(
        tuple(kept),
        tuple(tuple(number[rank] for rank in ranks[place]) for place in kept),
        {new: rank for rank, new in number.items()},
        frozenset(),
        world,
        len(stay),
        _together([place for place in range(len(ranks)) if place not in kept], ranks, whole),
    )


def more(
    ranks: Ranks,
    full: Ranks,
    home: Sequence[int],
    come: Collection[int],
    stages: Sequence[Sequence[int]] = (),
) -> Resize:
    """Return the world with nodes for the places ``come`` of the full world.

    ``full``: the ranks of each place of that world; ``home``: the place in it of each place of
    the present one; ``stages``: the ranks of that world that hold the same, if not all do: what a
    rank takes over that was none is of its own stage.
    """
    now = {place: index for index, place in enumerate(home)}
    places = sorted({*home, *come})
    number = {
        rank: new
        for new, rank in enumerate(sorted(rank for place in places for rank in full[place]))
    }
    size = sum(map(len, ranks))
    stage_of = {rank: stage for stage, own in enumerate(stages) for rank in own}
    known: dict[int, list[int]] = {}  # present ranks of each stage
    for place, index in now.items():
        for rank, here in zip(full[place], ranks[index], strict=True):
            known.setdefault(stage_of.get(rank, 0), []).append(here)
    origin: dict[int, int] = {}
    anew: set[int] = set()
    for place in places:
        for at, rank in enumerate(full[place]):
            if place in now:
                origin[number[rank]] = ranks[now[place]][at]
            else:
                alike = sorted(known[stage_of.get(rank, 0)])
                origin[number[rank]] = alike[number[rank] % len(alike)]
                anew.add(number[rank])
    return Resize(
        tuple(now.get(place, -1) for place in places),
        tuple(tuple(number[rank] for rank in full[place]) for place in places),
        origin,
        frozenset(anew),
        size,
        len(number),
    )


def owners(
    origin: Mapping[int, int],
    old: int,
    new: int,
    original: int,
    lengths: Collection[int] = (),
    stages: Sequence[Sequence[int]] = (),
) -> dict[int, tuple[int, ...]]:
    """Return for each rank of a world of ``new`` those of ``old`` whose own snapshots it needs.

    First its ``origin``, which it goes on with, then those that had the shares of the global batch
    which are its own now: the positions in the data are theirs. Then those with parts of its
    blocks. ``original``: number of ranks that the job began with; ``lengths``: see
    ``holders_of_blocks``; ``stages``: the ranks of ``old`` that hold the same part of the model,
    if a replica's ranks compute a share together: then all of a rank's are of its own stage.
    """
    found = {}
    for before, after in successors(stages or [range(old)], origin):
        shares = original * len(before) // old
        for replica, rank in enumerate(after):
            own = shares_of(replica, len(after), shares)
            held = [before[holder(share, len(before))] for share in own]
            blocks = holders_of_blocks(rank, new, old, lengths)
            found[rank] = tuple(dict.fromkeys([origin[rank], *held, *blocks]))
    return found


def _together(
    left: Sequence[int], ranks: Ranks, whole: Sequence[frozenset[int]]
) -> tuple[tuple[int, ...], ...]:
    """Divide places into the sets that share replicas."""
    sets: list[tuple[set[int], set[int]]] = []  # places, numbers of their replicas
    for place in left:
        own = {at for at, members in enumerate(whole) if members & set(ranks[place])}
        joined = [each for each in sets if each[1] & own]
        merged = {place}.union(*(each[0] for each in joined)), own.union(*(e[1] for e in joined))
        sets = [*(each for each in sets if each not in joined), merged]
    return tuple(sorted(tuple(sorted(places)) for places, _ in sets))
