"""The turn to decode: one thread of a process at a time calls a decode that is not ``parallel``.

Tokenizers are often shared by sources, and many must not be called by two threads at once.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONG = 5.0  # seconds that a decode has run, to be reported

_turn = threading.Lock()
_running: tuple[str, float] | None = None
_watchers: list[Callable[[str], object]] = []


def watch(watcher: Callable[[str], object]) -> None:
    """Have ``watcher`` called with each place that is decoded, and with "" after it."""
    _watchers.append(watcher)


def begin(place: str) -> None:
    """Wait for the turn, to decode what is at ``place``."""
    global _running
    _turn.acquire()
    _running = (place, time.monotonic())
    for watcher in _watchers:
        watcher(place)


def end() -> None:
    """Let another thread decode."""
    global _running
    _running = None
    for watcher in _watchers:
        watcher("")
    _turn.release()


def long_decode() -> str:
    """Return "; decode has run for …" if one has: then other sources wait for it as well."""
    running = _running
    return "" if running is None else told(*running)


def told(place: str, began: float) -> str:
    """Return the words of ``long_decode`` for a decode that has run since ``began``."""
    lasts = time.monotonic() - began
    return f"; decode has run for {lasts:.0f} s on {place}" if lasts >= LONG else ""
