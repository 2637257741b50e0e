"""What a script changes between save() and the next optimizer step, as the snapshot remembers it.

A learning rate that the script computes anew at each step changes there, and so does a replay
buffer: after a restart both are changed again, and nothing is lost. What was changed *after* save()
is lost, and only the first step after a restart tells them apart: there it does not change again.
What changes before the very first step of a run, too, is changed by the beginning of a step.
"""

from __future__ import annotations

from ..assembly import Assembly, Step
from ..leaves import Leaf
from ..values import Encoded

KEY = "between"


class Between:
    """The names of what changed; a section of the state without tensors."""

    def __init__(self) -> None:
        self.key = KEY
        self.leaves: list[list[Leaf]] = []
        self.names: set[str] = set()
        """Of this run, as far as they were compared."""
        self.expected: set[str] = set()
        """Of the run that saved the restored state: to change again before the first step."""

        self.early: set[str] = set()
        """Settings of optimizers, and schedulers, that changed before the first step of a run."""

    def collect(self) -> Encoded:
        """Return the names, encoded."""
        return [sorted(self.names), sorted(self.early)]

    def plan(self, saved: Assembly, encoded: Encoded) -> list[Step]:
        """Take the saved names as expected."""
        known = isinstance(encoded, list) and [*map(type, encoded)] == [list, list]
        names, early = encoded if known else ((), ())
        self.expected, self.names, self.early = {*names}, {*names}, {*early}
        return []
