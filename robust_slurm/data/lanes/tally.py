"""The count of a lane's records and of its bad ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from robust_slurm.data.errors import DataError
from robust_slurm.data.say import say
from robust_slurm.text import counted, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from robust_slurm.data.sources.base import BadRecord, SourceOptions

LEAST = 1000  # "most_bad" is a share of at least so many records


class Figures(NamedTuple):
    """Sums of what a process has read of a lane; what was read twice counts twice, but for
    ``records`` and ``bad``."""

    records: int
    bad: int
    tokens: int
    busy: float  # s of CPU time to read and decode

    def plus(self, other: Figures) -> Figures:
        """Return the sums of both."""
        records, bad, tokens, busy = (mine + theirs for mine, theirs in zip(self, other))  # noqa: B905
        return Figures(int(records), int(bad), int(tokens), busy)


class Tally:
    """Records that a lane has read in this process. A record that is read again counts once."""

    def __init__(self, options: SourceOptions) -> None:
        self.records = 0
        self.bad = 0
        self._tokens = 0
        self._busy = 0.0
        self._options = options
        self._furthest = (-1, 0, 0)

    def add(self, epoch: int, turn: int, record: int, bad: BadRecord | None) -> None:
        """Count one record, by its place in the lane. Raise DataError if it must not be bad."""
        new = (epoch, turn, record) > self._furthest
        if new:
            self._furthest = (epoch, turn, record)
            self.records += 1
            self.bad += bad is not None
        if bad is not None:
            self._judge(bad, new)

    def add_well(self, epoch: int, turn: int, records: Sequence[int]) -> None:
        """Count records of one part that are not bad, in the part's order."""
        if not records:
            return
        new = [record for record in records if (epoch, turn, record) > self._furthest]
        if new:
            self._furthest = (epoch, turn, new[-1])
            self.records += len(new)

    def state(self) -> list[int]:
        """Return what another process goes on from."""
        return [self.records, self.bad, *self._furthest]

    def adopt(self, state: Sequence[int]) -> None:
        """Go on from where another process came to, unless this one has come further."""
        records, bad, *furthest = state
        if tuple(furthest) >= self._furthest:
            self.records, self.bad = records, bad
            self._furthest = (furthest[0], furthest[1], furthest[2])

    def spend(self, tokens: int, busy: float) -> None:
        """Count what a window had, and took."""
        self._tokens += tokens
        self._busy += busy

    def figures(self) -> Figures:
        """Return the sums so far."""
        return Figures(self.records, self.bad, self._tokens, self._busy)

    def _judge(self, bad: BadRecord, new: bool) -> None:
        place = f"{bad.part}: record {bad.record}: {one_line(bad.why, 300)}"
        if self._options.bad != "skip":
            raise DataError(f'{place}; bad="skip" leaves such records out')
        if self.bad > self._options.most_bad * max(self.records, LEAST):
            raise DataError(
                f"{place}; {counted(self.bad, 'bad record')} of {self.records},"
                f" more than most_bad={self._options.most_bad:g} allows"
            )
        if new and (bad.rest or str(self.bad).strip("0") == "1"):  # the 1st, 10th, 100th …
            many = f"{counted(self.bad, 'bad record')} of {self.records} skipped by this lane"
            say(f"{place}; {many}")
