"""Measure the time between two moments of the training, on its device's clock if it has one.

A call into CUDA only queues work, but it may wait for work that was queued before: for room in a
full queue, or for all of it. The training would spend that time without the call too, so the host's
clock would count the training's own work as a cost of the call. The time between two events in the
training's stream contains only what the calls between them have added.
"""

from __future__ import annotations

import time
from typing import Any

from . import gpu


class WorkMark:
    """This moment: the work that the calling thread has done, and what it has queued, end here."""

    def __init__(self) -> None:
        self.at = time.perf_counter()
        self._device = gpu.current()
        self._event: Any = None
        if self._device is not None:
            self._event = gpu.event(gpu.cuda.current_stream(self._device), timed=True)

    def passed(self) -> bool:
        """True if the device has reached this moment, so that ``since`` need not wait for it."""
        return self._event is None or bool(self._event.query())

    def since(self, other: WorkMark) -> float:
        """Seconds from ``other`` to this one. Waits until the device has passed both."""
        if self._event is not None and self._device == other._device:
            try:
                self._event.synchronize()
                return max(0.0, float(other._event.elapsed_time(self._event)) / 1000)
            except RuntimeError:
                pass  # a device that has failed has no clock, and the training will see that
        return self.at - other.at
