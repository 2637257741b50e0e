"""Signals to a slot's rank, also those that come before the rank is ready for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from srun_wrapper.agent.loop import Loop
from srun_wrapper.agent.processes import process_tree

READY = 30.0  # s for a new rank to install its handler of a signal that came before
AGAIN = 0.1  # s between two looks for that handler


class RankSignals:
    """Sends signals to process ``pid()`` (0: there is none), or with ``group`` to its group."""

    def __init__(self, loop: Loop, pid: Callable[[], int], *, group: bool) -> None:
        self._loop = loop
        self._pid = pid
        self._signal = os.killpg if group else os.kill  # without: it is in our own group

    def send(self, signum: int) -> None:
        """Send the signal now."""
        if pid := self._pid():
            try:
                self._signal(pid, signum)
            except (ProcessLookupError, PermissionError):
                pass

    def send_when_ready(self, signum: int) -> None:
        """Send the signal once the process handles it, or after ``READY`` seconds.

        In its first moments a rank would die of a signal that it is going to handle.
        """
        self._try(signum, time.monotonic() + READY)

    def _try(self, signum: int, give_up_at: float) -> None:
        pid = self._pid()
        if (pid and process_tree.expects(pid, signum)) or time.monotonic() >= give_up_at:
            self.send(signum)
        else:
            self._loop.later(AGAIN, lambda: self._try(signum, give_up_at))
