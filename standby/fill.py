"""Laying a job's grid of groups out over minipods: a heuristic. Pure.

The grid: a row is a pipeline (PP) group, a column a data-parallel (DP) group, a cell the node (or
the few nodes, where a tensor group is larger than a node) in both. Every cell gets a minipod, a
minipod at most as many cells as it has room, and alpha * (most minipods of a column) +
(1 - alpha) * (most minipods of a row) shall be small.

The heuristic cuts the columns into bands and stacks rectangles as wide as the band in each, one
per minipod. So a row meets one minipod per band, and a column those of its band only; one
band keeps pipelines whole, as many bands as columns keep DP groups whole, and between the two lie
blocks that Arnold's program (``standby.exact.arnold``), which moves whole pipelines, cannot find.
Cells that no rectangle covers take what is left. It tries all numbers of bands, both ways round,
then other widths and orders at random (but the same every time).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise, repeat
from typing import NamedTuple

from standby.bound import bound
from standby.spread import weighted

_CELLS = 300_000  # cells laid out in all tries at random
_TRIES = 400
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

    ValueError if all together have not enough. The same input gives the same answer.
    """
    least = bound(rows, columns, room, alpha)
    best: Filled | None = None
    for turned, widths, order, dealing in _plans(rows, columns, room):
        shape, weight = ((columns, rows), alpha) if turned else ((rows, columns), 1 - alpha)
        bands = _Bands(*shape, widths, room, weight)
        bands.deal(order, dealing)
        if best is not None and bands.at_least() >= best.weighted(alpha):
            continue
        grid = bands.grid()
        found = measured([list(line) for line in zip(*grid, strict=True)] if turned else grid)
        if best is None or found.weighted(alpha) < best.weighted(alpha):
            best = found
        if best.weighted(alpha) <= least:
            break
    assert best is not None  # there is always the plan of one band
    return best


_Plan = tuple[bool, list[int], list[int], str]
_DEALINGS = ("chain", "deal", "finish")


def _plans(rows: int, columns: int, room: Sequence[int]) -> Iterator[_Plan]:
    """Turned by 90 degrees or not, widths of the bands, order of minipods, how they are dealt."""
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
    chance = random.Random(0)
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
        columns: int,
        widths: Sequence[int],
        room: Sequence[int],
        row_weight: float,
    ) -> None:
        self._rows, self._columns, self._widths = rows, columns, widths
        self._room = list(room)
        self._row_weight = row_weight
        self._missing = [rows] * len(widths)  # rows of each band
        self._stacks: list[list[tuple[int, int]]] = [[] for _ in widths]  # minipod and height

    def deal(self, order: Sequence[int], dealing: str) -> None:
        """``chain``: band after band, the last of a band the smallest minipod that ends it;
        ``deal``: each minipod to the band that lacks most; ``finish``: to one that it ends.
        """
        if dealing == "chain":
            for band, width in enumerate(self._widths):
                while self._missing[band]:
                    able = [j for j in order if self._room[j] >= width]
                    if not able:
                        break
                    ending = [j for j in able if self._room[j] // width >= self._missing[band]]
                    self._stack(band, min(ending, key=self._room.__getitem__, default=able[0]))
            return
        for pod in order:
            bands = [b for b, n in enumerate(self._missing) if n and self._height(b, pod)]
            if dealing == "finish":
                ended = [b for b in bands if self._height(b, pod) == self._missing[b]]
                bands = ended or bands
            if bands:
                self._stack(max(bands, key=lambda b: self._missing[b] * self._widths[b]), pod)

    def at_least(self) -> float:
        """The weighted spread that the rectangles alone come to."""
        column = max(len({pod for pod, _ in stack}) for stack in self._stacks)
        row = len({stack[0][0] for stack in self._stacks if stack})
        return weighted(column, row, 1 - self._row_weight)

    def _height(self, band: int, pod: int) -> int:
        """Rows of the rectangle that the minipod could be."""
        return min(self._missing[band], self._room[pod] // self._widths[band])

    def _stack(self, band: int, pod: int) -> None:
        height = self._height(band, pod)
        self._stacks[band].append((pod, height))
        self._missing[band] -= height
        self._room[pod] -= height * self._widths[band]

    def grid(self) -> Grid:
        """The rectangles; each cell beside them to the minipod that adds least to its lines."""
        by_band = []
        for stack, missing in zip(self._stacks, self._missing, strict=True):
            pods = [pod for pod, height in stack for _ in range(height)]
            by_band.append([*pods, *repeat(_NONE, missing)])
        grid = [
            [pod for pod, n in zip(row, self._widths, strict=True) for _ in range(n)]
            for row in zip(*by_band, strict=True)
        ]
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
