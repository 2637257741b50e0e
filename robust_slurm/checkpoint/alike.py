"""Whether ranks that share a state still hold the same, told by their checksums of it. Pure.

The last bit of a checksum says what it is of: 1 of every byte, 0 of a few items of each tensor.
Only checksums of one kind can be compared; a rank that hears too late that a step goes to disk has
the other kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

KEPT = 512  # steps of a group for which the first checksum is remembered


class Claim(NamedTuple):
    """What one rank's snapshot of a step says."""

    needs: tuple[int, ...]
    """The ranks that its state is put together from."""
    same: int
    """Its checksum of what they share; -1: unknown."""


def mark(crc: int, *, whole: bool) -> int:
    """A checksum that says what it is of."""
    return crc << 1 | whole


def is_whole(checksum: int) -> bool:
    """Whether it is of every byte."""
    return checksum >= 0 and bool(checksum & 1)


def differ(checksums: Iterable[int]) -> bool:
    """Whether two of a kind differ."""
    known = {checksum for checksum in checksums if checksum >= 0}
    return len(known) > len({checksum & 1 for checksum in known})


def apart(claims: Mapping[int, Claim]) -> list[tuple[int, ...]]:
    """The groups of which no state may be put together: their ranks hold different ones, or do not
    all count themselves to the group. ``claims``: of the ranks, of one step."""
    found = []
    for group in sorted({claim.needs for claim in claims.values() if len(claim.needs) > 1}):
        members = [claims[rank] for rank in group if rank in claims]
        if any(m.needs != group for m in members) or differ(m.same for m in members):
            found.append(group)
    return found


class Comparison:
    """Of the checksums that ranks report while they train, step by step as they come."""

    def __init__(self) -> None:
        self._first: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}

    def add(self, group: tuple[int, ...], rank: int, reported: Iterable[tuple[int, int]]) -> str:
        """Take (step, checksum) of a rank. Returns who differs where; empty if nobody does."""
        first = self._first.setdefault(group[0], {})
        for step, same in reported:
            other, known = first.setdefault((step, same & 1), (rank, same))
            if known != same:
                return f"ranks {other} and {rank} differ at step {step}"
        while len(first) > KEPT:
            del first[next(iter(first))]  # the one that came first
        return ""

    def forget(self, group: tuple[int, ...] = ()) -> None:
        """What was said of this group, or of all."""
        if group:
            self._first.pop(group[0], None)
        else:
            self._first.clear()
