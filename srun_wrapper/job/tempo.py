"""The job's step time against its own past (pure, times passed in).

In a synchronous training all ranks step together, so the step time says that something is slow, and
never what. Steps are counted in periods; a period's step time is the median of its reports, so one
long save or evaluation in it does not count.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

FACTOR = 1.3  # slow: so many times the usual step time
EASED = 1.15  # not slow any more
PERIODS = 4  # that must be slow in a row
REPORTS = 3  # of a period, at the least
USUAL = 240  # periods that the usual step time is the median of: an hour, as a rule


class Slowdown(NamedTuple):
    """Seconds per step: now, and as usual."""

    now: float
    usual: float

    @property
    def factor(self) -> float:
        return self.now / self.usual


@dataclass(slots=True)
class Tempo:
    """Step times of periods, over all epochs. ``window``: seconds that steps must be slow."""

    window: float = 60.0
    periods: list[float] = field(default_factory=list)  # seconds per step, the newest last
    closed: int = 0  # number of periods so far
    _reports: list[float] = field(default_factory=list)
    _seconds: float = 0.0

    def new_epoch(self) -> None:
        """Forget the period that has begun: the ranks start anew."""
        self._reports.clear()
        self._seconds = 0.0

    def forget(self) -> None:
        """Forget all: from now on a step is another amount of work."""
        self.periods.clear()
        self.new_epoch()

    def add(self, gap: float, steps: int) -> None:
        """Note that ``steps`` steps took ``gap`` seconds."""
        self._reports.append(gap / steps)
        self._seconds += gap
        if self._seconds >= self.window / PERIODS and len(self._reports) >= REPORTS:
            self.periods.append(statistics.median(self._reports))
            del self.periods[: -(USUAL + PERIODS)]
            self.closed += 1
            self.new_epoch()

    def usual(self) -> float | None:
        """Return the usual step time before the newest periods; None: it is not known yet."""
        past = self.periods[:-PERIODS]
        return statistics.median(past) if len(past) >= PERIODS else None

    def slow(self) -> Slowdown | None:
        """Return how slow the job is, if all of the newest periods are."""
        usual = self.usual()
        if not usual or min(newest := self.periods[-PERIODS:]) < FACTOR * usual:
            return None
        return Slowdown(statistics.median(newest), usual)

    def still_slow(self, usual: float) -> bool:
        """True if the newest periods are slow against a step time that was usual before."""
        newest = self.periods[-PERIODS:]
        return bool(newest) and statistics.median(newest) >= FACTOR * usual

    def eased(self, usual: float) -> bool:
        """True if the newest period is about as fast as ``usual``."""
        return bool(self.periods) and self.periods[-1] < EASED * usual

    def accept(self, usual: float) -> None:
        """Take this step time for the usual one from now on."""
        self.periods = [usual] * (2 * PERIODS)
