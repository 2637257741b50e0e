"""The time that a soak lost to each of its faults. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from bench.common import Results


@dataclass(frozen=True, slots=True)
class Course:
    """A training by the times of its steps. ``step``: the median time between two, in seconds."""

    made: Sequence[tuple[float, int]]
    step: float
    _first: list[float] = field(default_factory=list)
    """Times of the steps that were made for the first time."""

    def __post_init__(self) -> None:
        best = -1
        for wall, step in self.made:
            if step > best:
                best = step
                self._first.append(wall)

    def lost(self, begin: float, end: float) -> float:
        """Return the seconds of this window in which no new step was made at the usual pace."""
        new = bisect_right(self._first, end) - bisect_right(self._first, begin)
        return end - begin - new * self.step


def record_lost(
    results: Results, course: Course, windows: Sequence[tuple[str, float, float]]
) -> None:
    """Add what faults cost. ``windows``: kind, begin and end of each, in the order of time."""
    costs: defaultdict[str, list[float]] = defaultdict(list)
    order = []
    for kind, begin, end in windows:
        costs[kind].append(course.lost(begin, end))
        order.append(f"{kind} {costs[kind][-1]:.2f}")
    for kind, lost in costs.items():
        results.once(f"{kind}.lost_mean_s", fmean(lost), "s")
    results.once("soak.step_s", course.step, "s")
    results.settings["lost_s in order"] = ", ".join(order)
