"""Files that cannot be read for a while: one line for a source, however many of its lanes wait."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from robust_slurm.data.say import say
from robust_slurm.text import one_line

if TYPE_CHECKING:
    from robust_slurm.data.sources.base import SourceOptions

_lock = threading.Lock()
_waiting: dict[str, weakref.WeakSet[object]] = {}
"""The lanes of this process that try again, by their source's name."""


def begin(lane: object, name: str, what: str, patience: float, options: SourceOptions) -> None:
    """Note that a lane tries again, for so many seconds at the most; print ``what`` has happened
    and where, if it is the first one of its source ``name``."""
    with _lock:
        lanes = _waiting.setdefault(name, weakref.WeakSet())
        first = not lanes
        lanes.add(lane)
    if first:
        text, then = one_line(f"{name}: {what}"), f'then stalled="{options.stalled}" applies'
        say(f"source {text}; trying again for {patience:g} s, {then}")


def end(lane: object, name: str) -> None:
    """Note that a lane reads again."""
    with _lock:
        _waiting.get(name, weakref.WeakSet()).discard(lane)
