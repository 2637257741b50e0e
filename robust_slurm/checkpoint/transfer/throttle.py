"""A token bucket: how long to wait before the next bytes may go."""

from __future__ import annotations


class Bucket:
    """``rate`` bytes per second, at most a tenth of a second's worth at once; 0: no limit."""

    def __init__(self, rate: float, now: float) -> None:
        if rate < 0:
            raise ValueError(f"a rate of {rate} bytes/s")
        self._rate = rate
        self._free = rate / 10
        self._at = now

    @property
    def piece(self) -> int:
        """Bytes to send at once, 0 for as many as there are."""
        return max(64 << 10, int(self._rate / 20)) if self._rate else 0

    def take(self, count: int, now: float) -> float:
        """Account for ``count`` bytes sent now. Returns the seconds to wait before the next."""
        if not self._rate:
            return 0.0
        self._free = min(self._rate / 10, self._free + (now - self._at) * self._rate)
        self._at = now
        self._free -= count
        return max(0.0, -self._free / self._rate)
