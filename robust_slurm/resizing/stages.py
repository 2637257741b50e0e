"""The ranks of a mesh by the part of the model that they hold: the stages of a pipeline. Pure.

Ranks of one stage differ along data-parallel dimensions only. A replica of the model has a rank of
each stage, and these compute a share of the batch together. Standard library only, Python 3.9
syntax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from numbers import Real
from operator import itemgetter

from .dimensions import DATA, PIPELINE

Stage = tuple[tuple[str, int, int], ...]
"""Name, index and size of each other dimension of more than one rank, by name."""


def pipelined(mesh: Mapping[str, int]) -> Mapping[str, int]:
    """Return a mesh that has a pipeline; {} for any other, whose ranks are not told apart here."""
    return mesh if any(size > 1 and name in PIPELINE for name, size in mesh.items()) else {}


def is_of(mesh: Mapping[str, int], size: int) -> bool:
    """Return True if a mesh, or {}, can be that of so many ranks."""
    numbers = all(isinstance(each, Real) and each > 0 for each in mesh.values())
    return not mesh or (numbers and prod(mesh.values()) == size)


def stage_of(rank: int, mesh: Mapping[str, int]) -> Stage:
    """Return the stage of a rank; () in a mesh of data-parallel dimensions only."""
    found = []
    for name, size in reversed(list(mesh.items())):
        rank, index = divmod(rank, size)
        if name not in DATA and size > 1:
            found.append((name, index, size))
    return tuple(sorted(found))


def replica_of(
    rank: int,
    size: int,
    mesh: Mapping[str, int],
    is_data: Callable[[str], bool] = DATA.__contains__,
) -> tuple[int, int]:
    """Return the number of a rank's replica, and how many there are. ``mesh``: of ``size`` ranks,
    or {}: each is a replica. ``is_data``: tells data-parallel dimensions by their names."""
    if not mesh:
        return rank, size
    number, count = 0, 1
    for name, length in reversed(list(mesh.items())):
        rank, index = divmod(rank, length)
        if is_data(name):
            number += index * count
            count *= length
    return number, count


def ranks_by_stage(mesh: Mapping[str, int], size: int) -> dict[Stage, tuple[int, ...]]:
    """Return the ranks of each stage, in the order of their replicas. ``mesh``: as in
    ``replica_of``. It goes through all ranks."""
    found: dict[Stage, list[int]] = {}
    for rank in range(size):
        found.setdefault(stage_of(rank, mesh), []).append(rank)
    return {stage: tuple(ranks) for stage, ranks in found.items()}


def is_other(stage: Stage, saved: Stage, *, resized: bool) -> bool:
    """Return True if a rank of ``stage`` cannot go on with what one of ``saved`` has saved.

    ``resized``: they are ranks of different worlds. Else it is the same rank, maybe of a script
    that names its mesh otherwise now: only another place in the pipeline is another stage,
    whichever of the names of a pipeline's dimension each uses.
    """
    if resized:
        return stage != saved
    # Two dimensions of a pipeline are told apart by their sizes, by their names if these are equal.
    both = ([each[1:] for each in one if each[0] in PIPELINE] for one in (stage, saved))
    here, there = (sorted(one, key=itemgetter(1)) for one in both)
    return bool(here and there) and here != there


def described(stage: Stage) -> str:
    """Return a stage as people write it: ``pp 0 of 2``."""
    return ", ".join(f"{name} {index} of {size}" for name, index, size in stage) or "the whole"


def successors(
    stages: Sequence[Sequence[int]], origin: Mapping[int, int]
) -> list[tuple[Sequence[int], list[int]]]:
    """Return for each stage its ranks in one world, and in a later one, by their ``origin``."""
    if not stages:
        return []
    at = {rank: number for number, ranks in enumerate(stages) for rank in ranks}
    found: list[tuple[Sequence[int], list[int]]] = [(ranks, []) for ranks in stages]
    for rank, first in sorted(origin.items()):
        found[at[first]][1].append(rank)
    return found
