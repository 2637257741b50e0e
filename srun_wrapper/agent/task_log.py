"""Warnings of a robust-task: a line on its stderr, and one in robust-srun's log with its node.

``logging.getLogger("robust-task")`` from any thread. On the wire they are bounded in size
and, but for those that robust-srun counts (``warn_counted``), in rate: a fault of all nodes at once
floods neither robust-srun nor the file system of its log.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable

from robust_slurm.text import shown
from srun_wrapper.protocol.messages import Logged

MOST = 20  # lines of one robust-task within WINDOW
WINDOW = 60.0  # s
LONGEST = 500  # characters


class LineBound:
    """At most MOST lines within WINDOW; counts those that were left out. Pure but for its state."""

    def __init__(self) -> None:
        self._sent: deque[float] = deque(maxlen=MOST)
        self._dropped = 0

    def admit(self, now: float) -> int | None:
        """Return the number of lines left out since the last one; None: leave this one out too."""
        if len(self._sent) == MOST and now - self._sent[0] < WINDOW:
            self._dropped += 1
            return None
        self._sent.append(now)
        dropped, self._dropped = self._dropped, 0
        return dropped


class _ToSupervisor(logging.Handler):
    """``send`` takes the message in the thread of the caller."""

    def __init__(self, send: Callable[[Logged], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send
        self._bound = LineBound()

    def emit(self, record: logging.LogRecord) -> None:
        trouble = _as_text(getattr(record, "trouble", ""))
        # Nothing else tells of a trouble, and a rank has few: it passes the bound.
        dropped = 0 if trouble else self._bound.admit(time.monotonic())
        if dropped is not None:
            text = _as_text(record.getMessage())
            self._send(Logged(0, record.levelno, text, dropped, trouble))


def _as_text(message: str) -> str:
    # An old file name may not be UTF-8. A message that cannot be encoded would fail again at every
    # new connection.
    return message[:LONGEST].encode(errors="replace").decode()


class _ToStderr(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "told"):
            return
        try:
            line = f"robust-task: {shown(record.getMessage().rstrip())}\n"
            os.write(2, line.encode(errors="backslashreplace"))
        except OSError:
            pass  # srun may be gone, and stderr with it


_log = logging.getLogger("robust-task")
_log.addHandler(_ToStderr())
_log.propagate = False


def warn_only(text: str) -> None:
    """Warn in robust-srun's log alone: the user has been told by another line."""
    _log.warning(text, extra={"told": True})


def warn_counted(stream: str, trouble: str) -> None:
    """Warn of what may befall the streams of all ranks at once: robust-srun prints the first of
    them, and counts those that have the same ``trouble``."""
    _log.warning(f"{stream}: {trouble}", extra={"told": True, "trouble": trouble})


def begin(send: Callable[[Logged], None]) -> None:
    """Send warnings to the supervisor, too, from now on."""
    for handler in [h for h in _log.handlers if isinstance(h, _ToSupervisor)]:
        _log.removeHandler(handler)
    _log.handlers.insert(0, _ToSupervisor(send))  # first: a write to stderr may block
