"""Cost of saving for this rank so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..copying.mark import WorkMark
from ..planning.interval import Cost


class Stats:
    """Totals since the start of the process; times in s, of the host's clock."""

    def __init__(self) -> None:
        self.saves = 0
        """Calls of save()."""
        self.snapshots = 0
        """Complete snapshots."""
        self.torn = 0
        """Thrown away because tensors changed while they were copied."""
        self.blocked_s = 0.0
        """Time that the training's thread was in save(), and before an optimizer step. With a GPU
        it may wait there for what the GPU computes anyway: ``Meter`` leaves that out."""
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


class _Window:
    """The steps from save() of one step to that of another."""

    def __init__(self, step: int, replica_s: float) -> None:
        """``replica_s``: total of waiting for replicas by now."""
        self.step, self.replica_s = step, replica_s
        self.began = WorkMark()
        self.stood_s = 0.0
        """Time that training stood still, by the spans that are added up."""
        self.spans: deque[tuple[int, WorkMark, WorkMark]] = deque()
        """Spans that are not added up yet: 1, or -1 for what does not count; begin; end."""

    def add(self, *, all_of_them: bool) -> None:
        """Add up all spans, after a wait for the device, or those that it has passed."""
        while self.spans and (all_of_them or self.spans[0][2].passed()):
            sign, begin, end = self.spans.popleft()
            self.stood_s += sign * end.since(begin)


class Meter:
    """The cost of each snapshot, with the steps up to the next one."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._then: _Window | None = None
        """Since save() of the newest snapshot."""
        self._now: _Window | None = None
        """Since the newest save()."""

    def begin(self, step: int) -> None:
        """save() of this step begins."""
        then, now = self._then, self._now
        if now is not None and then is not None and now is not then:  # that step was not saved
            then.spans += now.spans
            then.add(all_of_them=False)
        self._now = _Window(step, self._stats.replica_s)

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Count the time of the block, in which training stands still for a snapshot."""
        begin = WorkMark()
        try:
            yield
        finally:
            self._stats.blocked_s += time.perf_counter() - begin.at
            self._add(1, begin)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the time of the block out of the cost of a snapshot."""
        begin = WorkMark()
        yield
        self._add(-1, begin)

    def _add(self, sign: int, begin: WorkMark) -> None:
        if self._now is not None:
            self._now.spans.append((sign, begin, WorkMark()))

    def cost(self, replica_s: float) -> Callable[[], Cost]:
        """Begin another snapshot. Return the function that computes the cost of the last one, in
        the copy thread. ``replica_s``: see ``Cost``."""
        was, now = self._then, self._now
        self._then = now
        return lambda: _cost(was, now, replica_s)


def _cost(was: _Window | None, now: _Window | None, replica_s: float) -> Cost:
    if was is None or now is None or was is now:
        return Cost(0.0, 0.0, 0.0, replica_s)
    was.add(all_of_them=True)
    stood = max(0.0, was.stood_s)
    waited = min(now.replica_s - was.replica_s, stood)
    steps = now.step - was.step
    step_s = (now.began.since(was.began) - stood) / steps if steps > 0 else 0.0
    return Cost(max(0.0, step_s), stood - waited, waited, replica_s)
