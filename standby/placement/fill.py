"""A heuristic that lays a job's grid of groups out over minipods. Pure.

The grid: a row is a pipeline (PP) group, a column a data-parallel (DP) group, a cell the node (or
the few nodes, where a tensor group is larger than a node) in both. Every cell gets a minipod, and a
minipod gets at most as many cells as it has room for. The smaller alpha * (most minipods of a
column) + (1 - alpha) * (most minipods of a row), the better.

The heuristic cuts the columns into bands and stacks rectangles as wide as the band in each, one
per minipod (or nearly rectangles, where not a cell can be wasted). So a row meets one minipod per
band, and a column those of its band only; one band keeps pipelines whole, as many bands as columns
keep DP groups whole, and between the two lie blocks that Arnold's program, which moves whole
pipelines (``bench/placement/exact.py``), cannot find. Cells that no rectangle covers take the rest.
It tries all numbers of bands, both ways round, then other widths and orders at random (with a fixed
seed), until it has reached the bound or its limit of work.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from standby.placement.bound import bound
from standby.placement.spread import weighted

_CELLS = 300_000  # cells laid out in all random tries together
_TRIES = 400
_LOOKS = 4_000_000  # times that a minipod is examined, in all tries; well under a second
_NONE = -1  # where a cell has no minipod yet

Grid = list[list[int]]
"""Minipod by row and column."""


class Filled(NamedTuple):
    """A layout and its spreads."""

    grid: Grid
    dp: int
    """Most minipods of a column."""
    pp: int
    """Most minipods of a row."""

    def weighted(self, alpha: float) -> float:
        return weighted(self.dp, self.pp, alpha)


def measured(grid: Grid) -> Filled:
    """The layout with its spreads."""
    pp = max(len(set(row)) for row in grid)
    return Filled(grid, max(len(set(column)) for column in zip(*grid, strict=True)), pp)


def fill(rows: int, columns: int, room: Sequence[int], alpha: float) -> Filled:
    """Lay the grid out over minipods with ``room`` for so many cells each.

    Raises ValueError if they have too little room together. The same input gives the same answer.
    """
    least = bound(rows, columns, room, alpha)
    best: Filled | None = None
    chance = random.Random(0)
    looks = 0
    for turned, widths, order, dealing in _plans(rows, columns, room, chance):
        bands = _Bands(columns if turned else rows, widths, room, alpha if turned else 1 - alpha)
        bands.deal(order, dealing)
        if dealing in ("snake", "pour"):
            bands.shuffle(chance)
        if best is None or bands.at_least() < best.weighted(alpha):
            grid = bands.grid()
            found = measured([list(line) for line in zip(*grid, strict=True)] if turned else grid)
            if best is None or found.weighted(alpha) < best.weighted(alpha):
                best = found
        looks += bands.looks
        if best.weighted(alpha) <= least or looks > _LOOKS:
            break
    assert best is not None  # there is always the plan of one band
    return best


_Plan = tuple[bool, list[int], list[int], str]
_DEALINGS = ("chain", "deal", "finish", "snake", "pour")


def _plans(rows: int, columns: int, room: Sequence[int], chance: random.Random) -> Iterator[_Plan]:
    """Yield plans: turned by 90 degrees or not, band widths, order and dealing of minipods."""
    largest = sorted(range(len(room)), key=lambda j: (-room[j], j))
    pods = sum(1 for free in room if free)
    shapes = [
        (turned, across, bands)
        for turned, across in ((False, columns), (True, rows))
        for bands in range(1, min(across, pods) + 1)
    ]
    for turned, across, bands in shapes:
        for dealing in _DEALINGS:
            yield turned, _even(across, bands), largest, dealing
    for _ in range(min(_TRIES, _CELLS // (rows * columns))):
        turned, across, bands = chance.choice(shapes)
        widths = _even(across, bands)
        if chance.random() < 0.5:
            cuts = sorted(chance.sample(range(1, across), bands - 1))
            widths = [b - a for a, b in pairwise((0, *cuts, across))]
        blur = 0.6 * chance.random()
        keys = [-free * (1 - blur * chance.random()) for free in room]
        yield turned, widths, sorted(largest, key=keys.__getitem__), chance.choice(_DEALINGS)


def _even(across: int, bands: int) -> list[int]:
    return [across // bands + (i < across % bands) for i in range(bands)]


class _Bands:
    """Bands of columns, in which rectangles of one minipod each are stacked from the top."""

    def __init__(
        self,
        rows: int,
        widths: Sequence[int],
        room: Sequence[int],
        row_weight: float,
    ) -> None:
        self._widths = widths
        self._room = list(room)
        self._row_weight = row_weight
        self._missing = [rows * width for width in widths]  # cells of each band
        self._stacks: list[list[tuple[int, int]]] = [[] for _ in widths]  # minipod and cells
        self.looks = 0

    def deal(self, order: Sequence[int], dealing: str) -> None:
        """Deal the minipods, in this order, to the bands.

        ``chain``: fill band after band, each with the smallest minipod that completes it as its
        last one. ``deal``: give each minipod to the band that lacks most cells. ``finish``: like
        deal, but first to a band that the minipod completes. ``snake``, ``pour``: like chain and
        deal, but to the last cell, so that two minipods may share a row of a band.
        """
        if dealing in ("chain", "snake"):
            whole = dealing == "chain"
            for band in range(len(self._widths)):
                able = [j for j in order if self._fits(band, j, whole)]
                while able and self._missing[band]:
                    ends = [j for j in able if self._fits(band, j, whole) == self._missing[band]]
                    pod = min(ends, key=self._room.__getitem__, default=able[0])
                    self._stack(band, pod, self._fits(band, pod, whole))
                    able.remove(pod)
            return
        whole = dealing != "pour"
        for pod in order if whole else [*order, *order]:  # again for the room left over
            bands = [b for b in range(len(self._widths)) if self._fits(b, pod, whole)]
            if dealing == "finish":
                ended = [b for b in bands if self._fits(b, pod) == self._missing[b]]
                bands = ended or bands
            if bands:
                band = max(bands, key=self._missing.__getitem__)
                self._stack(band, pod, self._fits(band, pod, whole))

    def shuffle(self, chance: random.Random) -> None:
        """Change the order within the bands: two of them shall not share the same row twice."""
        for stack in self._stacks:
            chance.shuffle(stack)

    def at_least(self) -> float:
        """Return the weighted spread of the stacks alone, without the cells beside them."""
        stacks = list(zip(self._stacks, self._widths, strict=True))
        column = max(len({pod for pod, n in stack if n >= width}) for stack, width in stacks)
        row = len({stack[0][0] for stack in self._stacks if stack})
        return weighted(column, row, 1 - self._row_weight)

    def _fits(self, band: int, pod: int, whole: bool = True) -> int:
        """Cells of the band that the minipod could take; ``whole``: rows."""
        self.looks += 1
        width = self._widths[band] if whole else 1
        return min(self._missing[band], self._room[pod] // width * width)

    def _stack(self, band: int, pod: int, cells: int) -> None:
        self._stacks[band].append((pod, cells))
        self._missing[band] -= cells
        self._room[pod] -= cells

    def grid(self) -> Grid:
        """Return the stacks as a grid; other cells go to the minipod that adds least spread."""
        by_band = []
        for stack, missing, width in zip(self._stacks, self._missing, self._widths, strict=True):
            cells = [pod for pod, n in stack for _ in range(n)] + [_NONE] * missing
            by_band.append([cells[i : i + width] for i in range(0, len(cells), width)])
        grid = [[pod for part in row for pod in part] for row in zip(*by_band, strict=True)]
        if any(self._missing):
            self._rest(grid)
        return grid

    def _rest(self, grid: Grid) -> None:
        in_row = [set(row) - {_NONE} for row in grid]
        in_column = [set(column) - {_NONE} for column in zip(*grid, strict=True)]
        weight = self._row_weight
        for r, row in enumerate(grid):
            for c, now in enumerate(row):
                if now != _NONE:
                    continue
                here, there = in_row[r], in_column[c]
                self.looks += len(self._room)
                costs = [
                    (
                        (j not in here) * weight * len(here)
                        + (j not in there) * (1 - weight) * len(there),
                        (j not in here) + (j not in there),
                        free,
                        j,
                    )
                    for j, free in enumerate(self._room)
                    if free
                ]
                row[c] = pod = min(costs)[-1]
                self._room[pod] -= 1
                here.add(pod)
                there.add(pod)
