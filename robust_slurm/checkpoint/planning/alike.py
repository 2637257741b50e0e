"""Check by checksums that ranks that share a state still hold the same. Pure.

The last bit of a checksum says what it is of: 1 of every byte, 0 of a few items of each tensor.
Only checksums of one kind can be compared; a rank that hears too late that a step goes to disk has
the other kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

KEPT = 512  # steps of a group for which the first checksum is remembered


class Claim(NamedTuple):
    """Claim of one rank's snapshot of a step about its shared state."""

    needs: tuple[int, ...]
    """The ranks that its state is put together from."""
    same: int
    """Its checksum of what they share; -1: unknown."""


def mark(crc: int, *, whole: bool) -> int:
    """A checksum that says what it is of."""
    return crc << 1 | whole


def is_whole(checksum: int) -> bool:
    """True if the checksum is of every byte."""
    return checksum >= 0 and bool(checksum & 1)


def differ(checksums: Iterable[int]) -> bool:
    """True if two checksums of one kind differ."""
    known = {checksum for checksum in checksums if checksum >= 0}
    return len(known) > len({checksum & 1 for checksum in known})


def apart(claims: Mapping[int, Claim]) -> list[int]:
    """The ranks that no state may be put together for, ascending: what it would be made of is not
    alike, or is kept by ranks that do not count themselves to the same group. ``claims``: of the
    ranks, of one step; one that is missing is not looked at."""
    found = []
    for rank, claim in sorted(claims.items()):
        others = [claims[each] for each in claim.needs if each in claims and each != rank]
        group = set(claim.needs)
        strange = any(len(o.needs) < 2 or {rank, *o.needs} != group for o in others)
        if strange or (others and differ([claim.same, *(other.same for other in others)])):
            found.append(rank)
    return found


class Comparison:
    """Compares the checksums that ranks report while they train, step by step as they come."""

    def __init__(self) -> None:
        self._first: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}

    def add(self, group: int, rank: int, reported: Iterable[tuple[int, int]]) -> str:
        """Take (step, checksum) of a rank. Returns who differs where; empty if nobody does.

        ``group``: its lowest rank."""
        first = self._first.setdefault(group, {})
        for step, same in reported:
            other, known = first.setdefault((step, same & 1), (rank, same))
            if known != same:
                return f"ranks {other} and {rank} differ at step {step}"
        while len(first) > KEPT:
            del first[next(iter(first))]  # the one that came first
        return ""

    def forget(self, group: int) -> None:
        """Forget what was reported of this group."""
        self._first.pop(group, None)
