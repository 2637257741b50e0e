"""The turn to decode: one thread of a process at a time calls a decode that is not ``parallel``.

Tokenizers are often shared by sources, and many must not be called by two threads at once.
"""

from __future__ import annotations

import threading
import time

LONG = 5.0  # seconds that a decode has run, to be reported

_turn = threading.Lock()
_running: tuple[str, float] | None = None


def begin(place: str) -> None:
    """Wait for the turn, to decode what is at ``place``."""
    global _running
    _turn.acquire()
    _running = (place, time.monotonic())


def end() -> None:
    """Let another thread decode."""
    global _running
    _running = None
    _turn.release()


def long_decode() -> str:
    """Return "; decode has run for …" if one has: then other sources wait for it as well."""
    running = _running
    if running is None or time.monotonic() - running[1] < LONG:
        return ""
    return f"; decode has run for {time.monotonic() - running[1]:.0f} s on {running[0]}"
