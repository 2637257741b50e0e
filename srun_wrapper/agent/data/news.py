"""News of a node's data process, for the reports to the supervisor: rare, and only what is new."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from srun_wrapper.protocol.data_messages import (
    DataFigures,
    DataReport,
    decode_figures,
    encode_report,
)

LEAST = 2.0  # s between two looks; a process says something every 2 s
INTERVALS = 10  # of reports, likewise: the larger the job, the rarer
REPEAT = 30.0  # s after which what has not changed is said again: a report may have been lost
SILENT = 30.0  # s without a new word after which a process's figures are those of the past
BYTES = 1 << 16


class DataNews:
    """``read`` returns what is known now; None as long as there is no data process."""

    def __init__(self, read: Callable[[], DataReport | None]) -> None:
        self._read = read
        self._next = self._again = 0.0
        self._told: DataReport | None = None

    def due(self, interval: float) -> bytes:
        """Return what is to be reported now. ``interval``: s between the node's reports."""
        now = time.monotonic()
        if now < self._next:
            return b""
        self._next = now + max(LEAST, INTERVALS * interval)
        found = self._read()
        if found is None or (found == self._told and now < self._again):
            return b""
        self._told, self._again = found, now + REPEAT
        return encode_report(found)


def figures(path: Path) -> DataFigures | None:
    """Return what a data process has last written there; None for what is old, or none of ours."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        state = os.fstat(fd)
        fresh = time.time() - state.st_mtime < SILENT
        if not fresh or not stat.S_ISREG(state.st_mode) or state.st_size > BYTES:
            return None
        return decode_figures(os.read(fd, BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        os.close(fd)
