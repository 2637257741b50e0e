"""Other schedulers' choices of nodes for a job, as far as minipods are concerned. Pure.

Each takes the free nodes of every minipod and the number of nodes of the job and returns the
minipod of each node, in rank order: ranks go over the nodes as over Slurm's sorted list, minipod
after minipod. None of them knows the job's groups.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import repeat

Baseline = Callable[[Sequence[int], int, random.Random], list[int]]


def best_fit(room: Sequence[int], need: int, _chance: random.Random) -> list[int]:
    """Node after node to the minipod with the least room left that has any."""
    return _in_turn(sorted(range(len(room)), key=lambda j: (room[j], j)), room, need)


def packing(room: Sequence[int], need: int, _chance: random.Random) -> list[int]:
    """GPU packing: as few minipods as can be, the last of them the tightest."""
    chosen: list[int] = []
    left = need
    by_room = sorted(range(len(room)), key=lambda j: (-room[j], j))
    while left > 0:
        free = [j for j in by_room if j not in chosen and room[j]]
        ending = [j for j in free if room[j] >= left]
        chosen.append(ending[-1] if ending else free[0])
        left -= room[chosen[-1]]
    return _in_turn(chosen, room, need)


def random_fit(room: Sequence[int], need: int, chance: random.Random) -> list[int]:
    """Any free nodes."""
    every = [j for j, free in enumerate(room) for _ in repeat(None, free)]
    return sorted(chance.sample(every, need))


def bipartition(room: Sequence[int], need: int, _chance: random.Random) -> list[int]:
    """Topology-aware: halve the minipods again and again and send the job down.

    Whole into a half where it fits (of two the one where it needs fewer minipods, then the
    tighter), else cut in proportion to the halves' room.
    That is recursive bipartitioning (Amaral et al., SC'17) with a job cut between consecutive
    ranks: in its own graph these have the strongest ties.
    """
    return _bipartition(sorted(range(len(room)), key=lambda j: (-room[j], j)), room, need)


def _bipartition(pods: Sequence[int], room: Sequence[int], need: int) -> list[int]:
    if need == 0:
        return []
    if len(pods) == 1:
        return [pods[0]] * need
    halves: list[list[int]] = [[], []]
    free = [0, 0]
    for pod in pods:  # the largest first, each to the half with less room
        half = int(free[1] < free[0])
        halves[half].append(pod)
        free[half] += room[pod]
    tight = int(free[1] < free[0])
    whole = [
        _bipartition(halves[half], room, need) for half in (tight, 1 - tight) if free[half] >= need
    ]
    if whole:
        return min(whole, key=lambda chosen: len(set(chosen)))
    first = min(free[0], max(need - free[1], round(need * free[0] / sum(free))))
    return _bipartition(halves[0], room, first) + _bipartition(halves[1], room, need - first)


def _in_turn(pods: Sequence[int], room: Sequence[int], need: int) -> list[int]:
    return [j for j in pods for _ in repeat(None, room[j])][:need]


BASELINES: dict[str, Baseline] = {
    "best-fit": best_fit,
    "random-fit": random_fit,
    "packing": packing,
    "bipartition": bipartition,
}
