"""The growth of this node's error counters since its agent began, told whenever it matters."""

from __future__ import annotations

from collections.abc import Callable

from srun_wrapper.agent.counters import gpus
from srun_wrapper.agent.counters.read import grown, read
from srun_wrapper.agent.loop import Loop

MOST = 64  # counters that are told, those that grew most
UNREAD: dict[str, int] = {}


class NodeCounters:
    """All counters of this node. The GPUs' take longer, so the others do not wait for them."""

    def __init__(self, loop: Loop, tell: Callable[[dict[str, int]], None]) -> None:
        """``tell``: given what has grown since the start, when that has changed."""
        self._tell = tell
        self._grown: dict[str, int] = {}
        self._parts = [Counters(loop, self._more, reader) for reader in (read, gpus.read)]

    def look(self) -> None:
        """Read them now."""
        for part in self._parts:
            part.look()

    def _more(self, grown: dict[str, int]) -> None:
        self._grown = {**self._grown, **grown}
        self._tell(self._grown)


class Counters:
    """Reads in a thread, one at a time: a device that does not answer holds no more than that."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[dict[str, int]], None],
        reader: Callable[[], dict[str, int]],
    ) -> None:
        """``tell``: given what has grown since the start, when that has changed."""
        self._loop = loop
        self._tell = tell
        self._reader = reader
        self._before: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self.reading = False
        self._again = False
        self.look()

    def look(self) -> None:
        """Read the counters; the first time, that is what they are compared with."""
        if self.reading:
            self._again = True
            return
        self.reading, self._again = True, False
        self._loop.run_in_thread(self._reader, self._read, UNREAD)

    def _read(self, now: dict[str, int]) -> None:
        self.reading = False
        # One that could not be read before counts from here; one that cannot be read now, stays.
        self._before = {**now, **self._before}
        more = {**self._told, **grown(self._before, now)}
        told = dict(sorted(more.items(), key=lambda item: -item[1])[:MOST])
        if told != self._told:
            self._told = told
            self._tell(told)
        if self._again:
            self.look()
