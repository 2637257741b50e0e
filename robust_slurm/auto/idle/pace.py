"""Delays imports while they slow the steps of the rank beside which they run.

At each import of a module, at any depth, the importing thread may pause. The length follows from
the rank's own step time, read from its heartbeat's record: the delay of its steps must be a small
share of import and pause together. What one import loads (a large library) cannot be interrupted.

Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

import os
import sys
import time

from robust_slurm import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType
    from typing import Any

FELT = 0.02
"""Share by which steps may be slower while a warm interpreter is prepared."""
WINDOW = 0.1  # s of importing between two looks at the steps
FEW = 4  # steps between two looks that are enough to judge
BASE = 2 * FEW
"""Steps before the first import that tell how long a step takes without any."""
PATIENCE = 1.0  # s to wait for them
_MOST = 15.0
"""Times as long as it ran that a thread may pause: steps may be slower for another reason."""
_LONGEST = 2.0  # s of one pause
IN_ALL = 5.0
"""s of all pauses; then only idle priority spares the rank, so that a noisy machine gets its warm
interpreter, too."""
_BIT = 0.05  # s between two looks in a pause
_GONE = 10  # times a step's time without a step: no training is disturbed; it may be restarting


def pause_of(quiet: float, busy: float, ran: float) -> float:
    """Return how many seconds to pause after ``ran`` seconds in which a step took ``busy`` and not
    ``quiet`` seconds, so that steps are slower by FELT in all of that time."""
    slower = busy / quiet - 1.0
    return min(_LONGEST, ran * min(_MOST, max(0.0, slower / FELT - 1.0)))


class ImportPace:
    """Finder that finds nothing; between ``with`` and its end it is the first to be asked."""

    def __init__(self, beats: str) -> None:
        """``beats``: path of the rank's record; "": there is no rank beside."""
        self._path = beats
        self._fd = -1
        self._quiet = 0.0
        """s of a step without imports beside it; 0.0: not known."""
        self._began = 0.0
        self._seen = (0, 0.0)
        self._left = IN_ALL

    def __enter__(self) -> None:
        if self._path:
            try:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:
                return
            self._wait(PATIENCE, BASE)
            sys.meta_path.insert(0, self)

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._quiet = -1, 0.0  # a module that has kept this finder may go on asking
            if self in sys.meta_path:  # a module may have made its own list
                sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        self.point()
        return None

    def point(self) -> None:
        """Pause, if that is due."""
        now = time.monotonic()
        if not self._quiet or now < self._began + WINDOW:
            return
        steps, busy = self._since(self._seen)
        if steps >= FEW:
            pause = pause_of(self._quiet, busy, now - self._began)
            if pause and self._left > 0:
                self._left -= pause
                self._wait(pause, 0)
            self._mark()

    def _wait(self, seconds: float, enough: int) -> None:
        """Let the rank alone for so long, or for ``enough`` steps; learn how long they take. End
        early where there are no more steps."""
        self._mark()
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            steps, each = self._since(self._seen)
            if now >= end or (enough and steps >= enough):
                break
            if self._quiet and now > self._read()[1] + _BIT + _GONE * self._quiet:
                break
            time.sleep(min(_BIT, end - now))
        if steps >= FEW or (steps and not self._quiet):
            self._quiet = (self._quiet + each) / 2 if self._quiet else each
        self._mark()

    def _mark(self) -> None:
        self._began, self._seen = time.monotonic(), self._read()

    def _since(self, seen: tuple[int, float]) -> tuple[int, float]:
        """Return the number of steps since then, and the seconds that each took."""
        beats, last = self._read()
        steps = beats - seen[0]
        return (steps, (last - seen[1]) / steps) if steps > 0 and seen[0] else (0, 0.0)

    def _read(self) -> tuple[int, float]:
        """Return the number of steps, and when the last one was; as last read, where the rank
        writes just now."""
        try:
            data = os.pread(self._fd, layout.BEAT.size, layout.BEAT_AT)
        except OSError:
            return self._seen
        if len(data) < layout.BEAT.size:
            return self._seen
        count, _, last, *_, tail = layout.BEAT.unpack(data)
        return (count, last) if count == tail else self._seen
