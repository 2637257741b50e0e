"""Call the watches that run beside the job, so that a defect of one of them ends nothing else."""

from __future__ import annotations

from collections.abc import Callable

TICK = 0.1  # s between two calls of all watches
Watch = Callable[[float], None]


class WatchGuard:
    """Calls watches so that a failing one neither ends the job nor silences another."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()

    def call(self, watch: Watch, now: float) -> None:
        try:
            watch(now)
        except Exception as err:  # noqa: BLE001 - whatever it is, the job goes on
            text = f"{watch.__qualname__}: {type(err).__name__}: {err}"
            if text not in self._said:
                self._said.add(text)
                self._say(f"internal error in a watch, the job goes on: {text}")
