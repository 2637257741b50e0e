"""Steps that a rank has in hand before it needs them, as descriptors of the ring's memory."""

from __future__ import annotations

import os
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.service import wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MOST = 24
"""Steps, if they are small: of large ones fewer are made ahead (``ring.py``). With these and those
of its Loader, a rank goes on without a data process."""
MOST_FDS = 64
"""Descriptors of them, of often 1024 that a rank may have open. One for each share."""


class StepInHand(NamedTuple):
    """One step, not mapped yet."""

    name: str  # of the state before it
    number: int
    pages: Sequence[tuple[int, Mapping[str, Any], int]]  # share, its head, descriptor
    state: Any  # after it


class StepsInHand:
    """Consecutive steps, the next one first."""

    def __init__(self) -> None:
        self._steps: deque[StepInHand] = deque()

    def add(self, message: Mapping[str, Any], fds: Sequence[int]) -> None:
        """Take what the data process has said, with its descriptors. Raises Closed."""
        heads = message["pages"]
        if len(heads) != len(fds):
            for fd in fds:
                os.close(fd)
            raise wire.Closed("descriptors are missing")
        held = [(int(share), head, fd) for (share, head), fd in zip(heads, fds)]  # noqa: B905 - 3.9
        step = StepInHand(str(message["name"]), int(message["number"]), held, message["state"])
        self._steps.append(step)

    def take(self) -> StepInHand:
        """Return the next step, whose descriptors are the caller's now."""
        return self._steps.popleft()

    def first(self) -> str:
        """Return the name of the next step."""
        return self._steps[0].name

    def state(self, before: Any) -> Any:
        """Return the state after the last step; ``before`` if there is none."""
        return self._steps[-1].state if self._steps else before

    def room(self) -> int:
        """Return for how many steps more there is room."""
        if not self._steps:
            return MOST
        most = min(MOST, MOST_FDS // max(1, len(self._steps[0].pages)))
        return max(0, most - len(self._steps))

    def clear(self) -> None:
        """Close all."""
        for step in self._steps:
            for _, _, fd in step.pages:
                os.close(fd)
        self._steps.clear()

    def __len__(self) -> int:
        return len(self._steps)
