"""Choose by time, outside robust-srun, the steps that all ranks write to disk.

Clocks of ranks differ, so rank 0 decides, a few steps ahead, and the others read which step it is
from torch.distributed's store. No collective is used: a rank may leave a save() out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

AHEAD = 3.0  # s between the decision and its step, so that all ranks have read it
LOOK = 1.0  # s between two questions to the store


class SharedKeys(Protocol):
    """The part of torch.distributed's store that is used."""

    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


class ByTime:
    """One rank's view. The first step is chosen without a word, the same on all ranks."""

    def __init__(
        self,
        seconds: float,
        rank: int,
        store: SharedKeys | None,
        run: str,
        *,
        first: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``store``: None for a rank that is alone. ``run``: name that all ranks of it know.
        ``first``: choose the first step, too. The time counts from now."""
        self._seconds, self._rank, self._store, self._run = seconds, rank, store, run
        self._first, self._clock = first, clock
        self._began = self._due_from = clock()
        self._looked = -math.inf
        self._orders = 0
        self._saves = 0
        self._last: int | None = None
        self._target: int | None = None

    def resumed(self) -> None:
        """Note that there is a step on disk: the first one need not be written."""
        self._first = False

    def takes(self, step: int) -> bool:
        """True if this step is to be written. Call this once for each step.

        Raises what the store raises."""
        now = self._clock()
        before, self._last = self._last, step
        distance = 1 if before is None else max(1, step - before)
        self._saves += 1
        if self._first:
            self._first, self._due_from = False, now
            return True
        if self._store is None:
            if now - self._due_from < self._seconds:
                return False
            self._due_from = now
            return True
        if self._target is None:
            self._target = self._order(step, distance, now) if self._rank == 0 else self._look(now)
            if self._target is not None and before is not None and self._target <= before:
                self._target = None  # too late: rank 0's commit fails, and names this rank
        if self._target is None or step < self._target:
            return False
        self._target = None
        return True

    def _order(self, step: int, distance: int, now: float) -> int | None:
        if now - self._due_from < self._seconds:
            return None
        self._due_from = now
        a_save = (now - self._began) / self._saves
        ahead = 2 + math.ceil(AHEAD / max(a_save, 1e-3))
        target = step + ahead * distance
        assert self._store is not None
        self._store.set(self._key(), str(target))
        self._orders += 1
        return target

    def _look(self, now: float) -> int | None:
        if now - self._looked < LOOK:
            return None
        self._looked = now
        assert self._store is not None
        if not self._store.check([self._key()]):
            return None
        target = int(self._store.get(self._key()))
        self._orders += 1
        return target

    def _key(self) -> str:
        return f"robust-slurm/{self._run}/durable-{self._orders}"
