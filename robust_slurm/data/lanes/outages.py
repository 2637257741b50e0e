"""Files that cannot be read for a while: one line for a source, however many of its lanes wait."""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING

from robust_slurm.text import one_line

if TYPE_CHECKING:
    from robust_slurm.data.lanes.lane import SourceLane

_lock = threading.Lock()
_waiting: dict[str, weakref.WeakSet[SourceLane]] = {}
"""The lanes of this process that try again, by their source's name."""


def begin(lane: SourceLane, why: str, patience: float) -> None:
    """Note that a lane tries again, for so many seconds at the most; print why, if it is the first
    one of its source."""
    with _lock:
        lanes = _waiting.setdefault(lane.name, weakref.WeakSet())
        first = not lanes
        lanes.add(lane)
    if first:
        place = one_line(f"{lane.name}: {lane.where}: {why}")
        then = f'then stalled="{lane.source.options.stalled}" applies'
        print(
            f"robust-slurm: data: source {place}; trying again for {patience:g} s, {then}",
            file=sys.stderr,
            flush=True,
        )


def end(lane: SourceLane) -> None:
    """Note that a lane reads again."""
    with _lock:
        _waiting.get(lane.name, weakref.WeakSet()).discard(lane)
