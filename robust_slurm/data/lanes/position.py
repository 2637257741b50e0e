"""The place where a lane is: the small part of its state, from which all of it follows."""

from __future__ import annotations

from typing import NamedTuple


class Position(NamedTuple):
    """The next sample of a lane: ``taken`` records into the ``turn``-th part of pass ``epoch``,
    both in the shuffled order.

    ``taken`` counts all records of the file, those too that are bad or left out. The position
    after the last sample of a part or a pass is that of the next sample there is.
    """

    epoch: int = 0
    turn: int = 0
    taken: int = 0
