"""The least spreads that a job's grid can have. Pure.

The grid is that of ``fill``: R rows, C columns, room for so many cells in each minipod. A
minipod that is in r rows and k columns has at most min(room, r * k) cells. With row spread P and
column spread D the sums of r and k over all minipods are at most R * P and C * D. Whether all
cells fit is then a small optimization problem. Its Lagrangian dual is solved here approximately:
any prices on r and k give a valid bound, good prices a tight one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate, product
from math import ceil, sqrt

from standby.placement.spread import weighted

_EPSILON = 1e-9
_FINEST = 1 / 16  # smallest step of the search for the best prices, in octaves


def check_room(rows: int, columns: int, room: Sequence[int]) -> None:
    """Raise ValueError if the grid is empty or there is too little room for it."""
    if rows < 1 or columns < 1:
        raise ValueError(f"a grid of {rows} x {columns} groups has no cell")
    if sum(room) < rows * columns:
        raise ValueError(f"{rows} x {columns} cells, but room for {sum(room)}")


def bound(rows: int, columns: int, room: Sequence[int], alpha: float) -> float:
    """Return a lower bound: no layout has a smaller weighted spread."""
    check_room(rows, columns, room)
    if columns > rows:  # the other way round there is less to compute
        return bound(columns, rows, room, 1 - alpha)
    pods = sum(1 for free in room if free)
    relaxed = Relaxed(rows, columns, room)
    pairs = product(range(fewest(columns, room), pods + 1), range(fewest(rows, room), pods + 1))
    excluded: list[tuple[int, int]] = []
    for p, d in sorted(pairs, key=lambda pair: (weighted(pair[1], pair[0], alpha), pair)):
        if any(p <= p2 and d <= d2 for p2, d2 in excluded):
            continue
        if not relaxed.excludes(p, d):
            return weighted(d, p, alpha)
        excluded.append((p, d))
    raise AssertionError("every pair excluded, also that of all minipods")


def fewest(cells: int, room: Sequence[int]) -> int:
    """Return the smallest number of minipods that have room for so many cells."""
    most = accumulate(sorted(room, reverse=True))
    return next(count for count, free in enumerate(most, 1) if free >= cells)


class Relaxed:
    """The problem without the positions of the rectangles."""

    def __init__(self, rows: int, columns: int, room: Sequence[int]) -> None:
        self._rows, self._columns = rows, columns
        self._cells = rows * columns
        self._mean = sum(free * free for free in room) / sum(room)
        # Cells, rows and columns of all rectangles that are best at some prices, by minipod.
        self._shapes = [
            (alike, _shapes(rows, columns, free)) for free, alike in Counter(room).items() if free
        ]

    def excludes(self, p: int, d: int) -> bool:
        """Return True if it is proven that no layout has these spreads.

        The dual is convex in the prices. The search begins at the prices that are best for minipods
        of equal room and any shape, and goes downhill in steps of an octave or less.
        """
        rows, columns = self._rows * p, self._columns * d
        goal = self._cells * (1 - _EPSILON)
        start = sqrt(self._mean * rows * columns) / 2
        prices = (start / rows, start / columns)
        most = self._most(prices, rows, columns)
        step = 1.0
        while most >= goal and step >= _FINEST:
            up = 2**step
            near = [
                (prices[0] * x, prices[1] * y)
                for x, y in ((up, up), (1 / up, 1 / up), (up, 1 / up), (1 / up, up))
            ]
            least, best = min((self._most(each, rows, columns), each) for each in near)
            if least < most:
                most, prices = least, best
            else:
                step /= 2
        return most < goal

    def _most(self, prices: tuple[float, float], rows: int, columns: int) -> float:
        """Cells that fit at most into so many rows and columns of minipods, by these prices."""
        of_row, of_column = prices
        return (
            rows * of_row
            + columns * of_column
            + sum(
                alike * max(0.0, *(n - of_row * r - of_column * k for n, r, k in shapes))
                for alike, shapes in self._shapes
            )
        )


def _shapes(rows: int, columns: int, free: int) -> list[tuple[int, int, int]]:
    found = []
    for k in range(1, columns + 1):
        for r in {min(rows, max(1, free // k)), min(rows, ceil(free / k))}:
            found.append((min(free, r * k), r, k))
    return found
