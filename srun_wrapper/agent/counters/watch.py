"""The growth of this node's error counters since its agent began, reported when it changes."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

import msgspec

from robust_slurm.error_counters import LARGEST, weight
from srun_wrapper.agent.counters import machine
from srun_wrapper.agent.counters.read import read
from srun_wrapper.agent.loop import Loop
from srun_wrapper.protocol.looking_messages import Machine

MOST = 64  # counters that are reported
UNREAD: dict[str, int] = {}
Got = Callable[[dict[str, int]], None]


class CounterReader:
    """One way to read counters; one reading at a time, also where a device does not answer."""

    def __init__(self, begin: Callable[[Got], None], got: Got) -> None:
        """``begin(got)`` starts a reading, whose result is passed to ``got``."""
        self._begin = begin
        self._got = got
        self.reading = False
        self._again = False

    def start_reading(self) -> None:
        if self.reading:
            self._again = True
            return
        self.reading, self._again = True, False
        self._begin(self._read)

    def _read(self, now: dict[str, int]) -> None:
        self.reading = False
        if self._again:
            self.start_reading()
        self._got(now)


class Counters:
    """Reads /sys in a thread, and GPUs as ``gpus`` does: neither waits for the other."""

    def __init__(
        self,
        loop: Loop,
        tell: Callable[[dict[str, int]], None],
        reader: Callable[[], dict[str, int]] = read,
        machines: Callable[[], Machine | None] = machine.read,
        gpus: Callable[[Got], None] | None = None,
    ) -> None:
        """``tell``: given what has grown since the start, when that has changed; ``machines``:
        reads the node's hardware and load; ``gpus``: begins a reading of the GPUs' counters."""
        self._loop = loop
        self._tell = tell
        self._machines = machines
        self.machine: Machine | None = None  # as read since ``inspect`` was called last
        self._inspecting = False
        self._first: Machine | None = None  # as the agent began
        self._last: dict[str, int] = {}
        self._grown: dict[str, int] = {}
        self._told: dict[str, int] = {}
        self.promised = False  # True: the reading in progress is reported, whatever it shows
        self._sources = [
            CounterReader(lambda got: loop.run_in_thread(reader, got, UNREAD), self._read),
            *([CounterReader(gpus, self._read)] if gpus is not None else []),
        ]
        self.start_reading()
        self._loop.run_in_thread(self._machines, self._begun, None)

    def _begun(self, first: Machine | None) -> None:
        self._first = first

    @property
    def reading(self) -> bool:
        return any(source.reading for source in self._sources)

    def start_reading(self) -> None:
        """Read the counters; the first time, that is what they are compared with."""
        for source in self._sources:
            source.start_reading()

    def promise(self) -> bool:
        """Return True if a reading is in progress: its result is then reported in any case."""
        self.promised = self.reading
        return self.promised

    def inspect(self) -> None:
        """Read the counters, and the node's hardware and load."""
        self.start_reading()
        self.machine = None  # with an old reading all growth since then would look new
        if not self._inspecting:
            self._inspecting = True
            self._loop.run_in_thread(self._machines, self._inspected, None)

    def _inspected(self, now: Machine | None) -> None:
        self._inspecting = False
        self.machine = since(self._first, now)

    def _read(self, now: dict[str, int]) -> None:
        self._grown = grown(self._grown, self._last, now)
        # A counter read for the first time counts from here; an unreadable one stays as it was.
        self._last = {**self._last, **now}
        told = gravest(self._grown)
        kept = self.promised and not self.reading
        if told != self._told or kept:
            self._told, self.promised = told, self.promised and not kept
            self._tell(told)


def since(first: Machine | None, now: Machine | None) -> Machine | None:
    """Leave out the links that were as narrow when the agent began: that made nothing slower."""
    if first is None or now is None:
        return now
    below = tuple(text for text in now.below if text not in first.below)
    return msgspec.structs.replace(now, below=below, first_links=dict(first.links))


def grown(
    so_far: Mapping[str, int], last: Mapping[str, int], now: Mapping[str, int]
) -> dict[str, int]:
    """Add what each counter has grown since it was read last (pure).

    A counter that is smaller now was reset in between: it adds nothing, and keeps its sum so far.
    """
    out = dict(so_far)
    for name, value in now.items():
        if value > (before := last.get(name, value)):
            out[name] = min(LARGEST, out.get(name, 0) + value - before)
    return out


def gravest(counters: Mapping[str, int]) -> dict[str, int]:
    """Return the ``MOST`` gravest counters (pure)."""
    items = counters.items()
    return dict(heapq.nsmallest(MOST, items, key=lambda item: (weight(item[0]), -item[1], item[0])))
