"""A job with empty places, and its spread while they are filled, one after another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from standby.placement.spread import Groups, weighted

Score = tuple[float, int]
"""Weighted maximum spread, total spread: smaller is better."""


class Vacancies:
    """The spread as counts per group, so that filling a place takes time for its groups only."""

    def __init__(
        self, job: Groups, minipod: Sequence[str], empty: Iterable[int], alpha: float
    ) -> None:
        """``minipod``: that of each place's node; its entries for ``empty`` places are ignored."""
        self._alpha = alpha
        self._groups_of: dict[int, list[int]] = {place: [] for place in empty}
        self._members: list[Counter[str]] = []  # places by minipod, of each group
        self._kind: list[int] = []
        # By kind, the number of groups with each spread: finds the worst without visiting all.
        self._spreads: tuple[Counter[int], ...] = (Counter(), Counter(), Counter())
        self._total = 0
        for number, some in enumerate(job):
            for group in some:
                for place in group:
                    if place in self._groups_of:
                        self._groups_of[place].append(len(self._members))
                stay = Counter(minipod[p] for p in group if p not in self._groups_of)
                self._members.append(stay)
                self._kind.append(number)
                self._spreads[number][len(stay)] += 1
                self._total += len(stay)

    @property
    def score(self) -> Score:
        """Return the score of the places that are filled now."""
        dp, pp, _tp = (max((n for n in some if some[n]), default=0) for some in self._spreads)
        return weighted(dp, pp, self._alpha), self._total

    def fill(self, place: int, pod: str) -> None:
        """Put a node of this minipod into an empty place."""
        self._change(place, pod, 1)

    def clear(self, place: int, pod: str) -> None:
        """Undo ``fill``."""
        self._change(place, pod, -1)

    def tried(self, place: int, pod: str) -> Score:
        """Return the score with a node of this minipod in the empty place; nothing changes."""
        self.fill(place, pod)
        found = self.score
        self.clear(place, pod)
        return found

    def _change(self, place: int, pod: str, by: int) -> None:
        for group in self._groups_of[place]:
            members, spreads = self._members[group], self._spreads[self._kind[group]]
            before = len(members)
            members[pod] += by
            if not members[pod]:
                del members[pod]
            spreads[before] -= 1
            spreads[len(members)] += 1
            self._total += len(members) - before
