"""Where a lane is: the small part of its state, from which all of it follows."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """The next sample of a lane: ``taken`` records into the ``turn``-th part of pass ``epoch``,
    both in the shuffled order."""

    epoch: int = 0
    turn: int = 0
    taken: int = 0
