"""Cost of saving for this rank so far."""

from __future__ import annotations

import time
from typing import NamedTuple

from ..planning.interval import Cost


class Stats:
    """Totals since the start of the process; times in s."""

    def __init__(self) -> None:
        self.saves = 0
        """Calls of save()."""
        self.snapshots = 0
        """Complete snapshots."""
        self.torn = 0
        """Thrown away because tensors changed while they were copied."""
        self.blocked_s = 0.0
        """Time that training stood still: in save(), and before an optimizer step."""
        self.waited_s = 0.0
        """The part of it before optimizer steps."""
        self.replica_s = 0.0
        """The part of it that waited for a replica."""
        self.copy_s = 0.0
        """Time of the copies, beside training."""
        self.last_copy_s = 0.0
        """The newest of them."""
        self.bytes = 0
        """Size of the newest snapshot."""

    def copied(self, seconds: float, size: int) -> None:
        self.snapshots += 1
        self.copy_s += seconds
        self.last_copy_s = seconds
        self.bytes = size

    def __repr__(self) -> str:
        return f"Stats({', '.join(f'{k}={v:.6g}' for k, v in vars(self).items())})"


class _Spent(NamedTuple):
    """Start of save() of a step, and the totals of waiting by then."""

    step: int
    at: float
    blocked_s: float
    replica_s: float


class Meter:
    """The cost of each snapshot, with the steps up to the next one."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._now = self._then = _Spent(0, 0.0, 0.0, 0.0)  # then: by the newest snapshot

    def begin(self, step: int) -> None:
        """save() of this step begins."""
        stats = self._stats
        self._now = _Spent(step, time.perf_counter(), stats.blocked_s, stats.replica_s)

    def leave_out(self, seconds: float) -> None:
        """Time that training stood still, which is no cost of a snapshot."""
        self._then = self._then._replace(blocked_s=self._then.blocked_s + seconds)

    def cost(self, replica_s: float) -> Cost:
        """Return the cost of the last snapshot; another begins now. ``replica_s``: see ``Cost``."""
        was, now = self._then, self._now
        self._then = now
        steps = now.step - was.step if was.at else 0
        blocked, waited = now.blocked_s - was.blocked_s, now.replica_s - was.replica_s
        step_s = (now.at - was.at - blocked) / steps if steps > 0 else 0.0
        return Cost(max(0.0, step_s), max(0.0, blocked - waited), waited, replica_s)
