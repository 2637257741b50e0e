"""The steps that a data process holds: some handed out, some made ahead, bounded in bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from robust_slurm.data.service.in_hand import MOST_FDS as HAND_FDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from robust_slurm.data.service.made_step import MadeStep

AHEAD = 8  # steps that are made before anybody asks
SMALL = 32  # the same for small steps, which are soon used up; at most an eighth of the memory
BACK = 16  # steps kept after they were handed out: a restarted rank goes back a few steps
KEPT = 4  # of these, kept however large they are: the ranks are not all at the same step
MEMORY = 256 << 20  # bytes in all; half of them for steps ahead
TEXT = 1 << 16
"""Bytes of states that a rank is sent before it asks for them: less than a socket holds, since it
reads nothing while it computes."""


class Level(NamedTuple):
    """Steps and bytes that a ring holds, and may hold."""

    ahead: int  # steps that nobody has asked for
    most_ahead: int
    size: int  # bytes of all steps
    memory: int


class StepRing:
    """Consecutive steps. ``memory``: bytes; exceeded by large steps, see KEPT, and one ahead."""

    def __init__(
        self,
        memory: int = MEMORY,
        ahead: int = AHEAD,
        small: int = SMALL,
        back: int = BACK,
    ) -> None:
        self._memory, self._ahead, self._small, self._back = memory, ahead, small, back
        self._made: list[MadeStep] = []
        self._served = 0  # how many, from the front, were handed out

    def last(self) -> MadeStep | None:
        """Return the newest step."""
        return self._made[-1] if self._made else None

    def find(self, before: str, shares: Iterable[int]) -> MadeStep | None:
        """Return the step after this state, if it is here for all these shares."""
        made = next((made for made in self._made if made.before == before), None)
        return made if made is not None and made.pages.keys() >= set(shares) else None

    def follow(self, before: str, shares: Collection[int], most: int) -> list[MadeStep]:
        """Return the steps from this state on that are here for all these shares: at most ``most``,
        and no more than may be under way to a rank."""
        found: list[MadeStep] = []
        room, fds = TEXT, HAND_FDS
        while len(found) < most and (made := self.find(before, shares)) is not None:
            room, fds = room - len(made.state), fds - len(shares)
            if room < 0 or fds < 0:
                break
            found.append(made)
            before = made.after
        return found

    def serve(self, before: str) -> None:
        """Note that the training takes the step after this state; later ones count as ahead."""
        for place, made in enumerate(self._made):
            if made.before == before:
                self._served = place + 1

    def wants_more(self) -> bool:
        """Return whether another step is to be made ahead."""
        ahead = self._made[self._served :]
        if not ahead:
            return True
        if len(ahead) < self._ahead:
            return sum(made.size for made in ahead) < self._memory // 2
        return len(ahead) < self._most_ahead()

    def _most_ahead(self) -> int:
        """Return how many steps are made ahead, by the size of those that are here."""
        if not self._made:
            return self._ahead
        fit = self._memory // 8 * len(self._made) // max(1, self.size)
        return max(self._ahead, min(self._small, fit))

    def level(self) -> Level:
        """Return what is held now."""
        ahead = len(self._made) - self._served
        return Level(ahead, self._most_ahead(), self.size, self._memory)

    def add(self, made: MadeStep) -> None:
        """Take the next step; the oldest that were handed out make room for it."""
        if self._made and self._made[-1].after != made.before:
            self.clear(made.before)
        self._made.append(made)
        while self._served > KEPT and (self._served > self._back or self.size > self._memory):
            oldest = self._made.pop(0)
            oldest.close()
            self._served -= 1

    def clear(self, before: str = "") -> None:
        """Forget the step after this state and all later ones; all, if it is not here."""
        names = [made.before for made in self._made] + [made.after for made in self._made[-1:]]
        keep = names.index(before) if before in names else 0
        for made in self._made[keep:]:
            made.close()
        del self._made[keep:]
        self._served = min(self._served, keep)

    @property
    def size(self) -> int:
        """Bytes of all steps."""
        return sum(made.size for made in self._made)

    def __len__(self) -> int:
        return len(self._made)
