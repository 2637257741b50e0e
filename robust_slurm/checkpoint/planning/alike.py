"""Check by checksums that ranks that share a state still hold the same. Pure.

The last bit of a checksum says what it is of: 1 of every byte, 0 of a few items of each tensor.
Only checksums of one kind can be compared; a rank that hears too late that a step goes to disk has
the other kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

KEPT = 512  # steps of a group of which checksums are remembered until all ranks have reported
VOTERS = 3  # ranks; of two that differ nobody knows which one is wrong


class Claim(NamedTuple):
    """Claim of one rank's snapshot of a step about its shared state."""

    needs: tuple[int, ...]
    """The ranks that its state is put together from."""
    same: int
    """The checksum of what they share; -1: unknown."""


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
    """Return the ranks whose state must not be put together, ascending: its parts are not alike, or
    are kept by ranks that do not count themselves to the same group. ``claims``: by rank, of one
    step; a missing one is not looked at."""
    found = []
    for rank, claim in sorted(claims.items()):
        others = [claims[each] for each in claim.needs if each in claims and each != rank]
        group = set(claim.needs)
        named = {other.needs for other in others}  # mostly one: each is looked at once
        strange = any(len(needs) < 2 or {rank, *needs} != group for needs in named)
        if strange or (others and differ([claim.same, *(other.same for other in others)])):
            found.append(rank)
    return found


class Outcome(NamedTuple):
    """Comparison of one step of a group, by one kind of checksum."""

    step: int
    whole: bool
    """True if the checksums are of every byte."""
    differ: str = ""
    """The ranks that differ, in words; empty: all members have reported, and all hold the same."""
    odd: int | None = None
    """The one rank that differs from all others, which are alike; known once all have reported."""
    open: bool = False
    """Members have yet to report, and one rank may turn out to be the only one that differs."""


class _Votes:
    """The checksums of one step. It may wait long for some ranks, so a rank takes only a bit."""

    def __init__(self) -> None:
        self._ranks = 0  # a bit for each that has reported
        self._counts: Counter[int] = Counter()
        self._firsts: dict[int, int] = {}  # checksum → the first rank that had it

    def add(self, rank: int, same: int) -> None:
        if not self._ranks >> rank & 1:
            self._ranks |= 1 << rank
            self._counts[same] += 1
            self._firsts.setdefault(same, rank)

    def complete(self, members: Collection[int]) -> bool:
        return sum(self._counts.values()) >= len(members)

    def outcome(self, step: int, members: Collection[int]) -> Outcome | None:
        """Return what is known by now; None: nobody differs so far, and some are missing."""
        (same, first), *others = self._firsts.items()
        missing, whole = not self.complete(members), is_whole(same)
        if not others:
            return None if missing else Outcome(step, whole)
        why = f"ranks {first} and {others[0][1]} differ at step {step}"
        _, (few, least) = self._counts.most_common(2)
        if len(members) < VOTERS or len(others) > 1 or least > 1:
            return Outcome(step, whole, why)
        if missing:
            return Outcome(step, whole, why, open=True)
        return Outcome(step, whole, why, self._firsts[few])


class Comparison:
    """Compares the checksums that ranks report while they train, step by step as they come."""

    def __init__(self) -> None:
        self._votes: dict[int, dict[tuple[int, int], _Votes]] = {}

    def add(
        self, group: int, members: Collection[int], rank: int, reported: Iterable[tuple[int, int]]
    ) -> list[Outcome]:
        """Take (step, checksum) of a rank. Returns what has become known by them.

        ``group``: its lowest rank; ``members``: all its ranks."""
        votes, found = self._votes.setdefault(group, {}), []
        for step, same in reported:
            key = step, same & 1
            known = votes.setdefault(key, _Votes())
            known.add(rank, same)
            if (outcome := known.outcome(step, members)) is None:
                continue
            found.append(outcome)
            if not outcome.open and known.complete(members):
                del votes[key]
        while len(votes) > KEPT:
            del votes[next(iter(votes))]  # the one that came first
        return found

    def forget(self, group: int) -> None:
        """Forget what was reported of this group."""
        self._votes.pop(group, None)
