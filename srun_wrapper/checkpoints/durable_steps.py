"""Choose the steps that all ranks write to the durable tier (pure: steps, times are passed in).

A step counts on disk only when every rank has written it, and a rank writes one at a time. So it is
one decision for all: the ranks take the first by themselves, all the same one, and the next is
asked for when that one is over, some steps ahead so that all hear of it in time.
"""

from __future__ import annotations

from collections import Counter

GIVEN_UP = 660.0  # s after which a step that nobody reports on is over: longer than its writing


class DurableSteps:
    """``every``: steps between two, 0 for by time only."""

    def __init__(self, pause: float) -> None:
        """``pause``: s between two by time."""
        self._pause = pause
        self.every = 0
        self.begin(at_once=False)

    def begin(self, *, at_once: bool) -> None:
        """Begin an epoch; ``at_once``: its ranks write the first step they save."""
        self._at_once = at_once
        self._from = 0
        self._by_time = 0.0
        self._open: dict[int, float] | None = None  # step → when training had passed it
        self._written: Counter[int] = Counter()

    def resumed(self, step: int) -> None:
        """Note the step that the ranks resume from."""
        self._from = step

    def written(self, step: int, world: int) -> None:
        """Note that a rank has written a step, or failed to."""
        self._written[step] += 1
        if self._written[step] >= world:
            self.over(step)

    def over(self, step: int) -> None:
        """Note that a step is committed, or never will be: no rank writes it any more."""
        self._open = {s: passed for s, passed in self._opened().items() if s > step}
        self._written = Counter({s: n for s, n in self._written.items() if s > step})

    def hurry(self, now: float) -> None:
        """Order one as soon as none is being written."""
        self._by_time = now

    def is_open(self, before: int) -> bool:
        """True if a step older than ``before`` is being or going to be written."""
        return any(step < before for step in self._opened())

    def next(self, now: float, newest: int, ahead: int, *, timed: bool) -> int | None:
        """Return the step to order from all ranks, if it is time.

        ``newest``: that any rank has saved. ``ahead``: steps until all have heard, a guess if not
        ``timed``.
        """
        waiting = self._opened()
        for step, passed in list(waiting.items()):
            if newest > step:
                waiting[step] = passed or now
            if passed and now - passed > GIVEN_UP:
                del waiting[step]
        self._by_time = self._by_time or now + self._pause
        soon = newest + ahead
        if now >= self._by_time and all(step > soon + ahead for step in waiting):
            self._by_time = now + self._pause
        elif self.every and timed and not waiting:
            soon = -(-soon // self.every) * self.every
        else:
            return None
        waiting[soon] = 0.0
        return soon

    def _opened(self) -> dict[int, float]:
        if self._open is None:  # the ranks take the first by themselves, see Saver
            first = self._from + 1 if self._at_once else self._from + self.every
            if not self._at_once and self.every:
                first -= self._from % self.every
            self._open = {first: 0.0} if first > self._from else {}
        return self._open
