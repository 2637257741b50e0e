"""The shares of the global batch, one for each rank that the job began with. Pure.

A rank of a smaller world computes several. Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

from collections.abc import Collection

MOST_LENGTHS = 64  # of ``holders_of_blocks``: the supervisor goes through them for every rank


def shares_of(rank: int, size: int, original: int) -> tuple[int, ...]:
    """Return the shares that a rank of ``size`` computes: as many as others, or one more."""
    return tuple(range(rank, original, size))


def holder(share: int, size: int) -> int:
    """Return the rank of a world of ``size`` that computes this share."""
    return share % size


def holders_of_blocks(
    rank: int, size: int, saved_by: int, lengths: Collection[int]
) -> tuple[int, ...]:
    """Return the ranks of a world of ``saved_by`` whose blocks overlap those of a rank of ``size``.

    ``lengths``: those of the dimensions that are cut among all ranks, as ``torch.chunk`` cuts.
    """
    found: set[int] = set()
    for length in lengths:
        here, there = max(1, -(-length // size)), max(1, -(-length // saved_by))
        first, end = rank * here, min((rank + 1) * here, length)
        if first < end:
            found.update(range(first // there, (end - 1) // there + 1))
    return tuple(sorted(found))


def read_resized(text: str) -> tuple[int, int] | None:
    """Return (original, size) from ROBUST_RESIZED (``4:3``); None if it is not that."""
    first, _, second = text.partition(":")
    if not (first.isascii() and first.isdigit() and second.isascii() and second.isdigit()):
        return None
    original, size = int(first), int(second)
    return (original, size) if 0 < size < original else None
