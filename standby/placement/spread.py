"""The spread of a job's communication groups over minipods. Pure.

The objective of Arnold (arXiv 2509.15940): the spread of a group is the number of minipods that
its nodes are in, and what counts is the worst data-parallel (DP) and the worst pipeline (PP) group,

    alpha * max spread of DP groups + beta * max spread of PP groups,  alpha + beta = 1.

Every GPU is in one group of each kind, so one can mostly be improved only at the other's cost.
alpha = 0 keeps pipelines together, alpha = 1 packs. Arnold finds alpha by profiling: 0 for a dense
model of 24 B parameters, 0.3 for a mixture of experts, never more than 0.5 in practice.

A *place* is the position of one node in the job: the ranks that it runs. Which groups a place is
in follows from the mesh alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

from robust_slurm.checkpoint.planning.placement import group_ids
from robust_slurm.resizing.dimensions import placement_kind

ALPHA = 0.3
"""Weight of the DP groups where nobody has profiled the model: Arnold's for mixtures of experts."""

MOST_RANKS = 1_000_000
"""The most ranks of a mesh: more are a typing error, which would cost memory."""

Layout = int | Sequence[Sequence[int]]
"""Ranks of each place: as many consecutive ones for every place, or listed place by place."""


class Groups(NamedTuple):
    """The places of each group, by kind; groups of the same places count once."""

    dp: tuple[tuple[int, ...], ...]
    pp: tuple[tuple[int, ...], ...]
    tp: tuple[tuple[int, ...], ...]


class Spread(NamedTuple):
    """Minipods of the worst group of each kind, and of all groups (tensor ones too) added up."""

    dp: int
    pp: int
    total: int

    def weighted(self, alpha: float = ALPHA) -> float:
        """The objective. Rounded, so that equal ones compare equal."""
        return weighted(self.dp, self.pp, alpha)


def weighted(dp: int, pp: int, alpha: float) -> float:
    """alpha * dp + (1 - alpha) * pp, rounded, so that equal ones compare equal."""
    return round(alpha * dp + (1 - alpha) * pp, 9)


def check_alpha(alpha: float) -> None:
    """Raise ValueError unless 0 <= alpha <= 1."""
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha {alpha}: must be from 0 (pipelines first) to 1 (DP groups first)")


def parse_mesh(text: str) -> dict[str, int]:
    """Parse ``"pp=2,dp=8"`` into ``{"pp": 2, "dp": 8}``. Raises ValueError with the reason."""
    mesh: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if not (name and size.isascii() and size.isdigit() and len(size) < 8):
            raise ValueError(f"{text}: write it as pp=2,dp=12,tp=4")
        if int(size) < 1 or name in mesh:
            raise ValueError(f"{text}: {name} must be named once and be 1 or more")
        mesh[name] = int(size)
    if prod(mesh.values()) > MOST_RANKS:
        raise ValueError(f"{text}: {prod(mesh.values())} ranks, more than {MOST_RANKS}")
    return mesh


def groups(mesh: Mapping[str, int], ranks_per_node: Layout, places: int) -> Groups:
    """The groups of a job of ``places`` nodes.

    ``mesh``: size of each dimension in DeviceMesh order, the last varies fastest. ``pp…`` and
    ``pipe…`` are pipeline dimensions, ``tp…`` and ``tensor…`` tensor ones, all others together
    (dp_replicate, dp_shard, cp, …) data-parallel: gradients are reduced over them. A mesh of
    another number of ranks counts as one data-parallel group of all ranks.
    """
    of_place = place_ranks(ranks_per_node, places)
    place = {rank: number for number, ranks in enumerate(of_place) for rank in ranks}
    world = len(place)
    if not fits(mesh, world):
        mesh = {"dp": world}
    sizes = list(mesh.values())
    along: dict[str, list[int]] = {"dp": [], "pp": [], "tp": []}
    for number, name in enumerate(mesh):
        along[placement_kind(name)].append(number)
    found = {}
    for which, dims in along.items():
        members: dict[int, dict[int, None]] = {}
        # A group is named by its first rank: all its coordinates put to 0, one after another.
        ids = [group_ids(sizes, d) for d in dims]
        for rank in range(world):
            first = reduce(lambda r, of_rank: of_rank[r], ids, rank)
            members.setdefault(first, {})[place[rank]] = None
        found[which] = tuple(dict.fromkeys(tuple(sorted(group)) for group in members.values()))
    return Groups(**found)


def fits(mesh: Mapping[str, int], world: int) -> bool:
    """Return whether the mesh is one of ``world`` ranks."""
    return bool(mesh) and min(mesh.values()) >= 1 and prod(mesh.values()) == world


def place_ranks(ranks_per_node: Layout, places: int) -> list[Sequence[int]]:
    """Ranks by place. ValueError if they are not the ranks of one world of ``places`` nodes."""
    if isinstance(ranks_per_node, int):
        if ranks_per_node < 1:
            raise ValueError(f"{ranks_per_node} ranks per node: must be 1 or more")
        n = ranks_per_node
        return [range(i * n, (i + 1) * n) for i in range(places)]
    if len(ranks_per_node) != places:
        raise ValueError(f"ranks of {len(ranks_per_node)} nodes for {places} places")
    every = sorted(rank for ranks in ranks_per_node for rank in ranks)
    if every != list(range(len(every))):
        raise ValueError(f"{len(every)} ranks that are not 0 to {len(every) - 1}, each once")
    return list(ranks_per_node)


def spread(job: Groups, minipod: Sequence[str]) -> Spread:
    """Spread of a job whose place i is in ``minipod[i]``."""
    counts = [[len({minipod[i] for i in group}) for group in some] for some in job]
    dp, pp, _tp = (max(some, default=0) for some in counts)
    return Spread(dp, pp, sum(map(sum, counts)))
