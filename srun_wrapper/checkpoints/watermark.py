"""The newest step that all ranks have in memory (pure).

Ranks may leave steps out, each another one. The newest step of the slowest rank is therefore not a
step that all have: only counting shows which one is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

OPEN = 256
"""Steps beyond the slowest rank that are counted at most."""


class Watermark:
    """The watermark of one epoch. A rank reports steps in rising order."""

    def __init__(self) -> None:
        self.step = -1
        """Newest that every rank has reported; -1: none."""
        self.passed = -1
        """Newest step up to which no rank has a snapshot on its way to its replica."""
        self._safe: dict[int, int] = {}  # rank → newest step it has come to
        self._count: Counter[int] = Counter()  # step after ``passed`` → ranks that have it

    def began(self, rank: int) -> None:
        """Forget what the rank reported: it starts anew, maybe from an earlier step."""
        self._safe.pop(rank, None)
        self._count.clear()
        self.step = self.passed = -1

    def add(self, rank: int, safe: int, have: Sequence[int]) -> None:
        """Add a rank's report. ``safe``: the newest step that has its replica, or will have none,
        usable or not; ``have``: usable steps up to it, with or without ones reported before."""
        before = self._safe.get(rank, -1)
        self._count.update({step for step in have if step > before})
        self._safe[rank] = max(before, safe)
        if len(self._count) > OPEN:
            for step in sorted(self._count)[:-OPEN]:
                del self._count[step]

    def advance(self, world: int) -> bool:
        """Update ``step`` and ``passed``; True if either has risen."""
        if len(self._safe) < world:
            return False
        was = self.step, self.passed
        self.passed = max(self.passed, min(self._safe.values()))
        full = (step for step, count in self._count.items() if count >= world)
        self.step = max(full, default=self.step)
        # Every rank is past these steps: a rank that has not reported one never will.
        self._count = Counter({s: n for s, n in self._count.items() if s > self.passed})
        return (self.step, self.passed) != was
