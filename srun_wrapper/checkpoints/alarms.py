"""Report the same trouble of thousands of ranks in two lines, and each notice once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

COUNT_AFTER = 5.0  # s; so long the other ranks have to report the same trouble
# Numbers and made-up names differ between ranks and steps although the trouble is the same.
_VARIES = re.compile(r"[0-9a-f]{8,}|\d+")


def kind(text: str) -> str:
    """Return what is equal for the same trouble of any rank, step or file."""
    return _VARIES.sub("#", text)


@dataclass(slots=True)
class _Trouble:
    text: str
    since: float
    ranks: set[int] = field(default_factory=set)
    counted: bool = False


class Alarms:
    """Prints what is new through ``say``, and counts the ranks that repeat it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._troubles: dict[str, _Trouble] = {}

    def add(self, now: float, rank: int, text: str, line: str, same: str = "") -> bool:
        """Take one alarm; True if it is new, and ``line`` was printed.

        ``same``: what makes it the same trouble as another, if not its kind.
        """
        key = same or kind(text)
        trouble = self._troubles.get(key)
        new = trouble is None
        if trouble is None:
            trouble = self._troubles[key] = _Trouble(text, now)
            self._say(line)
        trouble.ranks.add(rank)
        return new

    def look(self, now: float) -> None:
        """Print, once for each trouble, how many more ranks have it."""
        for trouble in self._troubles.values():
            if trouble.counted or now - trouble.since < COUNT_AFTER:
                continue
            trouble.counted = True
            if more := len(trouble.ranks) - 1:
                ranks = "1 more rank" if more == 1 else f"{more:,} more ranks"
                self._say(f"checkpoints: … and {ranks}: {trouble.text}")


class Notices:
    """Prints each notice once."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[str] = set()

    def once(self, text: str, key: str = "") -> None:
        """Print ``text`` unless a notice with the same ``key`` (else the same text) was printed."""
        if (key or text) not in self._told:
            self._told.add(key or text)
            self._say(text)
