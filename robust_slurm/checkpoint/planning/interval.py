"""Set the interval between saves so that they cost training no more than they may. Pure.

A snapshot costs training what nothing hides (``blocked_s``), and the wait for the replica where
that takes longer than the steps until the next snapshot. With a snapshot every n steps of c s,
whose copy and replica take t s, both together are

    blocked + max(0, t - n c), and may be at most overhead * n * c.

All ranks must save the same steps, so it is one decision for all: the widest that any rank needs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

SAMPLES = 5  # of a rank; their median counts, as an evaluation or a busy core is no slow link
FEWEST = 3
WIDEN = 10.0  # s for which a rank must want more before all save less often
NARROW = 30.0  # s for which all must want less
MARGIN = 1.5  # a shorter interval is tried only if a replica this much slower would do
MOST = 10_000


class Cost(NamedTuple):
    """Cost of one snapshot for a rank, in s."""

    step_s: float
    """One step of the training, without what saving took."""
    blocked_s: float
    """Training stood still for the snapshot, whatever the network does."""
    waited_s: float
    """Training stood still until the replica was there."""
    replica_s: float
    """Time from save(), or where the device had come so far, until the replica was there."""


def least(cost: Cost, overhead: float, every: int, margin: float = 1.0) -> int:
    """The fewest steps between two snapshots that keep to ``overhead`` (0.03: 3 %).

    ``every``: steps between two when it was measured.
    """
    step = max(cost.step_s, 1e-6)
    took = cost.replica_s * margin
    hidden = cost.blocked_s / (overhead * step)
    shown = (cost.blocked_s + took) / ((1 + overhead) * step)
    found = min(MOST, max(1, math.ceil(max(hidden, shown) - 1e-9)))
    # Every step waits before the optimizer, not only before the next save().
    dear = cost.blocked_s + cost.waited_s > overhead * step
    return 2 if found == every == 1 and dear else found


def _median(costs: Iterable[Cost]) -> Cost:
    columns = [sorted(column) for column in zip(*costs, strict=True)]
    return Cost(*(column[len(column) // 2] for column in columns))


class Interval:
    """The interval between saves, from what snapshots cost; times in s of any clock."""

    def __init__(self, overhead: float) -> None:
        """``overhead``: 0 for every step, whatever it costs."""
        self._overhead = overhead
        self.begin()

    def begin(self) -> None:
        """Save every step again, as the ranks start anew."""
        self.every = 1
        self.first = 0
        """Step from which it holds."""
        self.worst: tuple[int, Cost] | None = None
        """The rank that decided it, and what a snapshot cost that rank."""
        self._forget()

    def _forget(self) -> None:
        self._costs: dict[int, deque[Cost]] = {}
        self._more_since: float | None = None
        self._less_since: float | None = None

    def hear(self, rank: int, step: int, cost: Cost) -> None:
        """Note the cost of a ``step`` that a rank has saved."""
        if self._overhead and step > self.first and cost.step_s > 0:
            self._costs.setdefault(rank, deque(maxlen=SAMPLES)).append(cost)

    def adjust(self, now: float, first: int) -> bool:
        """Change the interval from step ``first`` on, if needed; True if it changes.

        ``first`` must be late enough for all ranks to learn of it in time.
        """
        known = {r: _median(costs) for r, costs in self._costs.items() if len(costs) >= FEWEST}
        if not known:
            return False
        wants = {rank: least(cost, self._overhead, self.every) for rank, cost in known.items()}
        rank = max(wants, key=lambda r: (wants[r], -r))
        wide = wants[rank]
        narrow = max(least(c, self._overhead, self.every, MARGIN) for c in known.values())
        self._more_since = (self._more_since or now) if wide > self.every else None
        self._less_since = (self._less_since or now) if narrow < self.every else None
        if self._more_since is not None and now - self._more_since >= WIDEN:
            new = wide
        elif self._less_since is not None and now - self._less_since >= NARROW:
            new = narrow
        else:
            return False
        self.every, self.first = new, first
        self.worst = rank, known[rank]
        self._forget()
        return True

    def text(self) -> str:
        """Describe, for people, how often steps are saved, and why."""
        if self.worst is None:
            return ""
        rank, cost = self.worst
        why = (
            f"rank {rank}: a snapshot and its replica take {cost.replica_s:.3g} s, a step "
            f"{cost.step_s:.3g} s; checkpoint_overhead is {100 * self._overhead:g} %"
        )
        return f"{ordinal(self.every)} ({why})"


def ordinal(every: int) -> str:
    """Like "every step", "every 3rd step"."""
    if every == 1:
        return "every step"
    tens = every % 100 in (11, 12, 13)
    end = "th" if tens else {1: "st", 2: "nd", 3: "rd"}.get(every % 10, "th")
    return f"every {every}{end} step"
