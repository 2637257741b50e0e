"""The shares of the global batch, one for each rank that the job began with. Pure.

A rank of a smaller world computes several. Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations


def shares_of(rank: int, size: int, original: int) -> tuple[int, ...]:
    """Return the shares that a rank of ``size`` computes: as many as others, or one more."""
    return tuple(range(rank, original, size))


def holder(share: int, size: int) -> int:
    """Return the rank of a world of ``size`` that computes this share."""
    return share % size


def read_resized(text: str) -> tuple[int, int] | None:
    """Return (original, size) from ROBUST_RESIZED (``4:3``); None if it is not that."""
    first, _, second = text.partition(":")
    if not (first.isascii() and first.isdigit() and second.isascii() and second.isdigit()):
        return None
    original, size = int(first), int(second)
    return (original, size) if 0 < size < original else None
