"""A lane that is read by whichever process has it at the moment: a reader, or this one."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.service.readers.reader import worked

if TYPE_CHECKING:
    from robust_slurm.data.lanes.position import Position
    from robust_slurm.data.sample import Sample

    Window = list[tuple[Sample, Position]]

_users = itertools.count()


class WindowPool(Protocol):
    """The readers, as a lane asks them (``pool.py``)."""

    def window(self, lane: DealtLane) -> Window | None:
        """Return the next window of a lane; None: it is to be read here. Raises DataError."""

    def worked(self, seconds: float) -> None:
        """Note for how long a lane was read here."""

    def stuck(self, lane: DealtLane) -> str | None:
        """Kill the reader that gives nothing of a lane; return words on it. None: none reads it."""

    def leave(self, lane: DealtLane) -> None:
        """Have the reader of a lane close its file."""


class DealtLane(SourceLane):
    """A lane of which each window is read by the process that ``pool`` chooses.

    Its position and all that has been read are kept in this process: a reader of the next window
    needs nothing from the reader of the last one.
    """

    def __init__(self, lane: SourceLane, pool: WindowPool) -> None:
        """Take the samples of a lane, from the beginning, and its tally."""
        super().__init__(lane.source, lane.name, lane.lane, lane.lanes, lane.seed, lane.window)
        self.tally = lane.tally
        self._pool = pool
        self.closed = False
        self.user = next(_users)
        """A number of its own: a reader keeps a lane open for each user."""

    def copy(self) -> DealtLane:
        """Return a lane of the same samples, at the beginning, with the same tally."""
        return DealtLane(self, self._pool)

    @property
    def at(self) -> Position:
        """The position at which the next window begins."""
        return self._ahead

    def next_window(self) -> list[tuple[Sample, Position]]:
        """Return the rest of the window that the position is in, or the next one. Raises
        DataError; the next call tries the same window again."""
        window = self._pool.window(self)
        if window is None:
            began = worked()
            try:
                return super().next_window()
            finally:
                self._pool.worked(worked() - began)
        self.seek(window[-1][1])
        return window

    def stuck(self) -> str:
        """Return words on what the lane waits for, and end the reader that hangs."""
        told = self._pool.stuck(self)
        return super().stuck() if told is None else told

    def close(self) -> None:
        """Have its reader close its file."""
        self.closed = True
        self._pool.leave(self)
