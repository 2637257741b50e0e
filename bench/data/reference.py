"""Reference of the samples that a plan must give; it knows nothing of how they are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

Piece = tuple[int, int, int]
"""A document's number, the first of its tokens in a row, and how many."""


def wanted(
    documents: Iterable[tuple[int, int]], pack: int | None, long: str, epochs: int
) -> Counter[Piece]:
    """Return how often each piece must come in so many epochs."""
    found: Counter[Piece] = Counter()
    for number, length in documents:
        row = pack or length
        for first in range(0, length, row) if long == "split" else [0]:
            found[number, first, min(row, length - first)] += epochs
    return found


def may_be_lost(shares: int, batch: int, pack: int | None) -> int:
    """Return how many pieces may be left at the very end: too few for all ranks."""
    return shares - 1 if pack else shares * batch - 1


def shares_of(rank: int, inner: int, size: int, shares: int) -> list[int]:
    """Return whose rows a rank has: ``inner`` ranks in a row have the same ones, and those of
    ranks that are missing are dealt to the others."""
    return [share for share in range(shares) if share % size == rank // inner]
