"""The best layout of a job's grid, by mixed-integer programs; and Arnold's own program.

``exact`` minimises the objective of ``spread`` itself. Which of the rows have which
minipods does not matter, only how many rows have which set: for every set of P minipods the number
of rows that keep to it, and how many of these take which minipod in each column. That has no
symmetry between rows, which is what makes the plain program too slow. One program per P finds the
smallest column spread; those that cannot beat what is known are not solved.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations, repeat
from math import ceil, comb
from typing import NamedTuple

from bench.placement.highs import Program, Terms
from standby.placement.bound import Relaxed, check_room, fewest
from standby.placement.fill import Filled, Grid, fill, measured
from standby.placement.spread import weighted

_LARGEST = 100_000  # variables; larger programs are left unsolved


class Solved(NamedTuple):
    filled: Filled
    bound: float
    """No layout has a smaller weighted spread."""

    def proven(self, alpha: float) -> bool:
        """True if no order is better."""
        return self.filled.weighted(alpha) <= self.bound


def exact(
    rows: int, columns: int, room: Sequence[int], alpha: float, limit_s: float = 10.0
) -> Solved:
    """The best layout that ``limit_s`` seconds suffice for; see ``standby.placement.fill.fill``.

    Raises ``bench.placement.highs.SolverMissing`` where highspy is needed and not there.
    """
    until = time.monotonic() + limit_s
    best = fill(rows, columns, room, alpha)
    bound = best.weighted(alpha)
    # Sets of minipods are taken along the longer side, of which there are more lines alike.
    turned = columns > rows
    weight = 1 - alpha if turned else alpha
    if turned:
        rows, columns = columns, rows
    least = columns_bound(rows, columns, room)
    for p in sorted(least):
        goal = best.weighted(alpha)
        smaller = [d for d in range(least[p], len(room) + 1) if weighted(d, p, weight) < goal]
        if not smaller:
            continue
        left_s = until - time.monotonic()
        grid, d = _least_columns(rows, columns, room, p, max(smaller), left_s)
        if grid is not None:
            found = measured([list(line) for line in zip(*grid, strict=True)] if turned else grid)
            if found.weighted(alpha) < goal:
                best = found
        bound = min(bound, weighted(max(d, least[p]), p, weight))
    return Solved(best, min(bound, best.weighted(alpha)))


def columns_bound(rows: int, columns: int, room: Sequence[int]) -> dict[int, int]:
    """Row spread → a column spread below which no layout with that row spread is.

    Row spreads that are impossible are absent.
    """
    check_room(rows, columns, room)
    pods = sum(1 for free in room if free)
    if columns > rows:
        return _inverted(columns_bound(columns, rows, room), pods)
    relaxed = Relaxed(rows, columns, room)
    found: dict[int, int] = {}
    d = fewest(rows, room)
    for p in range(pods, fewest(columns, room) - 1, -1):
        while d <= pods and relaxed.excludes(p, d):
            d += 1
        if d > pods:
            break
        found[p] = d
    return found


def _inverted(of: dict[int, int], pods: int) -> dict[int, int]:
    """Row spread → column spread from column spread → row spread."""
    found = {}
    for p in range(1, pods + 1):
        fitting = [d for d, least in of.items() if least <= p]
        if fitting:
            found[p] = min(fitting)
    return found


def _least_columns(
    rows: int, columns: int, room: Sequence[int], p: int, most: int, limit_s: float
) -> tuple[Grid | None, int]:
    """A layout of row spread ``p`` with the least column spread, which shall be at most ``most``.

    And a bound of that column spread: ``most`` + 1 where there is no such layout.
    """
    pods = [j for j, free in enumerate(room) if free]
    if limit_s <= 0 or comb(len(pods), p) * columns * p > _LARGEST:
        return None, 1
    program = Program()
    spread = program.integer(most, cost=1.0)
    meets = [{j: program.integer(1) for j in pods} for _ in range(columns)]
    sets = list(combinations(pods, p))
    count = [program.integer(rows) for _ in sets]
    program.between(rows, [(n, 1) for n in count], rows)
    cells: list[list[dict[int, int]]] = []  # by set, column, minipod
    used: dict[int, list[tuple[int, float]]] = defaultdict(list)
    met: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    for n, some in zip(count, sets, strict=True):
        cells.append([])
        for c in range(columns):
            taken = {j: program.integer(min(rows, room[j])) for j in some}
            program.between(0, [*((x, 1) for x in taken.values()), (n, -1)], 0)
            for j, x in taken.items():
                used[j].append((x, 1))
                met[c, j].append((x, 1))
            cells[-1].append(taken)
    for j in pods:
        program.at_most(used[j], room[j])
    for c, column in enumerate(meets):
        program.at_most([*((m, 1) for m in column.values()), (spread, -1)], 0)
        for j, m in column.items():
            program.at_most([*met[c, j], (m, -min(rows, room[j]))], 0)
    found = program.solve(limit_s)
    bound = most + 1 if found.proven and found.values is None else _up(found.bound)
    if found.values is None:
        return None, bound
    value = [round(x) for x in found.values]
    grid: Grid = []
    for n, of_set in zip(count, cells, strict=True):
        lines = [[j for j, x in taken.items() for _ in repeat(None, value[x])] for taken in of_set]
        grid += [list(row) for row in zip(*lines, strict=True)][: value[n]]
    return grid, bound


def _up(bound: float) -> int:
    """The least integer from 1 on that is not below ``bound``, rounding errors aside."""
    return ceil(bound - 1e-6) if bound > 1 else 1


def arnold(
    rows: int, columns: int, room: Sequence[int], alpha: float, limit_s: float = 10.0
) -> Filled | None:
    """Arnold's program (arXiv 2509.15940): whole pipelines (rows) over minipods.

    min alpha * sum_j y_j + beta * T, subject to sum_j s_ij <= T; sum_i p_ij <= c_j y_j;
    sum_j p_ij = 1; p_ij <= s_ij, where p_ij is the share of row i in minipod j. Here in cells, so
    that nothing need be rounded. None if nothing was found in time.
    """
    check_room(rows, columns, room)
    pods = [j for j, free in enumerate(room) if free]
    program = Program()
    worst = program.integer(len(pods), cost=1 - alpha)
    used = {j: program.integer(1, cost=alpha) for j in pods}
    in_pod: dict[int, list[tuple[int, float]]] = {j: [] for j in pods}
    share: list[dict[int, int]] = []
    for _ in range(rows):
        cells = {j: program.integer(min(columns, room[j])) for j in pods}
        there = {j: program.integer(1) for j in pods}
        everything: Terms = [(x, 1) for x in cells.values()]
        program.between(columns, everything, columns)
        program.at_most([*((s, 1) for s in there.values()), (worst, -1)], 0)
        for j in pods:
            program.at_most([(cells[j], 1), (there[j], -columns)], 0)
            in_pod[j].append((cells[j], 1))
        share.append(cells)
    for j in pods:
        program.at_most([*in_pod[j], (used[j], -room[j])], 0)
    found = program.solve(limit_s)
    if found.values is None:
        return None
    value = [round(x) for x in found.values]
    return measured(
        [[j for j, x in cells.items() for _ in repeat(None, value[x])] for cells in share]
    )
