"""The wait of a training for its replicas: bounded, and given up while the store lags."""

from __future__ import annotations

import time
from collections.abc import Callable

from .client import Client
from .stats import Stats


class Patience:
    """Belongs to the training thread."""

    def __init__(
        self, client: Client, stats: Stats, say: Callable[[str], None], *, replica_wait: float
    ) -> None:
        """``replica_wait``: s to wait for each replica, at most."""
        self._client, self._stats, self._say, self._most = client, stats, say, replica_wait
        self._lags = False
        self._unsafe = -1

    @property
    def left(self) -> float:
        """Seconds that a wait may take now."""
        return 0.0 if self._lags else self._most

    def begin(self, step: int) -> None:
        """Note a complete snapshot, for whose replica ``end`` waits before the next one."""
        self._unsafe = step

    def end(self) -> None:
        """Wait for the replica of the snapshot before: two are never on their way at once."""
        if self._unsafe >= 0:
            self.wait(self._unsafe)
            self._unsafe = -1

    def wait(self, step: int) -> None:
        """Wait until ``step`` is safe."""
        patience, start = self.left, time.perf_counter()
        lags = not self._client.wait_safe(step, patience)
        self._stats.replica_s += time.perf_counter() - start
        if lags and not self._lags:
            self._say(
                f"step {step} has no replica after {patience:.0f} s; training continues without "
                f"waiting until the store has caught up: more than one step can be lost meanwhile"
            )
        self._lags = lags
