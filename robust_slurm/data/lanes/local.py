"""A lane that this process reads: a thread reads ahead of the planner."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes.budget import ReadClaim
from robust_slurm.data.lanes.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from robust_slurm.data.lanes.budget import ReadBudget
    from robust_slurm.data.lanes.lane import SourceLane
    from robust_slurm.data.lanes.window import LaneWindow
    from robust_slurm.data.sample import Meta, Ref, Sample

AHEAD = 4096  # samples of a lane that are read ahead at the most, and not of more than two passes
AT_ONCE = 32  # samples that a feed gives at once, where they are read already
TURN = 5.0  # s of a wait between two looks at the time


class _Patience:
    """The time for which a lane gives nothing. It begins anew where this process has been stopped
    meanwhile, as by ``scontrol suspend``."""

    def __init__(self, lane: SourceLane) -> None:
        self._lane = lane
        self._began = self._looked = time.monotonic()

    def left(self) -> float:
        """Return how long to wait until the next look. Raises SourceStalled when it is over."""
        now = time.monotonic()
        if now - self._looked > 2 * TURN:
            self._began = now
        self._looked = now
        waited = now - max(self._began, self._lane.progress)
        patience = self._lane.source.options.patience
        if waited >= patience:
            lane = self._lane
            raise SourceStalled(
                f"{lane.name}: {lane.where}: nothing for {waited:.0f} s{lane.stuck()}"
            )
        return min(patience - waited, TURN)


class ReadSamples(NamedTuple):
    """Samples of a lane in their order."""

    samples: list[Sample]
    sizes: list[int]
    turns: list[int]
    places: list[int | Position]  # after each: ``taken`` of that turn, or the whole position


class _Ready:
    """Windows that are read, of which samples are given one after the other."""

    def __init__(self) -> None:
        self._windows: deque[tuple[LaneWindow, list[int]]] = deque()  # with the samples' sizes
        self._at = 0  # in the first one
        self._left = 0

    def __len__(self) -> int:
        return self._left

    def add(self, window: LaneWindow, sizes: list[int]) -> None:
        """Add a window, and the size of each of its samples."""
        self._windows.append((window, sizes))
        self._left += len(window)

    def take(self, most: int) -> ReadSamples:
        """Return the next samples: 1 to ``most`` of them."""
        window, sizes = self._windows[0]
        begin, end = self._at, min(self._at + most, len(window))
        places, turns = window.places(begin, end), [window.turn] * (end - begin)
        given = ReadSamples(window.give(begin, end), sizes[begin:end], turns, places)
        self._left -= end - begin
        if end == len(window):
            self._windows.popleft()
            end = 0
        self._at = end
        return given

    def passes(self) -> int:
        """Return how many passes the last sample is ahead of the first."""
        return self._windows[-1][0].epoch - self._windows[0][0].epoch

    def clear(self) -> None:
        """Forget all."""
        self._windows.clear()
        self._at = self._left = 0


class _Reader:
    """A thread that reads a lane from a position on, as far ahead as the budget allows.

    A read that hangs cannot be ended from outside: ``stop`` leaves the thread to itself, with a
    lane of its own, and another reader goes on. It ends when its read does.
    """

    def __init__(self, lane: SourceLane, position: Position, budget: ReadBudget) -> None:
        self.lane = lane.copy()
        self.lane.seek(position)
        self._budget = budget
        self._changed = threading.Condition()
        self._ready = _Ready()
        self._error: DataError | None = None
        self._stopped = self._parked = False
        self._charged = 0  # bytes of the budget that are ready
        self._since, self._given = time.monotonic(), 0.0  # samples given lately, and since when
        name = f"data {lane.name}/{lane.lane}"
        self._thread = threading.Thread(target=self._read, name=name, daemon=True)
        self._claim = ReadClaim(0, self._begin)
        budget.ask(self._claim)

    @property
    def ready(self) -> int:
        """The samples that are read and not given yet."""
        return len(self._ready)

    def next(self, most: int) -> ReadSamples:
        """Return the next samples: 1 to ``most`` of them."""
        patience: _Patience | None = None
        with self._changed:
            while not self._ready:
                if self._error is not None:
                    error = self._error
                    if isinstance(error, SourceStalled):
                        self._error = None  # the thread tries again
                    raise error
                self._budget.force(self._claim)
                if self._error is not None:
                    continue
                patience = patience or _Patience(self.lane)
                self._changed.wait(patience.left())
            given = self._ready.take(most)
            self._charged -= sum(given.sizes)
            self._given += len(given.sizes)
            if self._parked and self._wants_more():
                self._changed.notify_all()
            return given

    def stop(self) -> None:
        """Stop reading; what is ready is forgotten."""
        with self._changed:
            self._stopped = True
            self._budget.settle(self._claim, 0)
            self._claim.granted.set()
            self._budget.give_back(self._charged)
            self._ready.clear()
            self._changed.notify_all()
        self.lane.close()

    def _begin(self) -> None:
        """Start the thread, in whichever thread has made room for it."""
        try:
            self._thread.start()
        except RuntimeError as error:
            self._error = DataError(f"{self.lane.name}: no thread to read it: {error}")

    def _read(self) -> None:
        while True:
            self._claim.granted.wait()
            with self._changed:
                if self._stopped:
                    return
            began = time.thread_time()
            try:
                window = self.lane.next_window()
                sizes = window.sizes()
            except DataError as error:
                if not self._failed(error):
                    return
            except BaseException as error:  # noqa: BLE001 - of decode, sys.exit() too: it is raised there
                made = DataError(f"{self.lane.where}: {type(error).__name__}: {error}")
                made.__cause__ = error
                self._failed(made)
                return
            else:
                size = sum(sizes)
                self.lane.tally.spend(sum(window.tokens), time.thread_time() - began)
                with self._changed:
                    if self._stopped:
                        return
                    self._error = None
                    self._ready.add(window, sizes)
                    del window, sizes  # they belong to whoever takes them
                    self._charged += size
                    self._budget.settle(self._claim, size)
                    self._changed.notify_all()
                    self._parked = True
                    self._changed.wait_for(lambda: self._stopped or self._wants_more())
                    self._parked = False
                    if self._stopped:
                        return
                    self._claim = ReadClaim(size, due=self._due())
                    self._budget.ask(self._claim)
                    self._changed.notify_all()  # a consumer that waits forces it

    def _due(self) -> float:
        """Return when all that is ready will have been given, at the recent rate. Without it, a
        lane that is seldom drawn from would be read ahead as far as others, in their room."""
        now = time.monotonic()
        lasted, given = now - self._since, self._given
        self._since, self._given = now - lasted / 2, given / 2
        return now + lasted * len(self._ready) / given if given else math.inf

    def _wants_more(self) -> bool:
        if not self._ready:
            return True
        return len(self._ready) < AHEAD and self._ready.passes() < 2

    def _failed(self, error: DataError) -> bool:
        """Hand the error to the consumer. Return True if the thread tries again."""
        with self._changed:
            self._error = error
            self._changed.notify_all()
            again = isinstance(error, SourceStalled) and not self._stopped
            if not again:
                self._budget.settle(self._claim, 0)
        return again


class LocalFeed:
    """A Feed of a lane that is read here (``lanes/feed.py``).

    Its thread and its samples are this process's own; ``budget`` is shared by the process's
    feeds. Samples count for the budget until they are taken or dropped. Threads of a process
    decode one at a time unless the source says otherwise: see ``sources/common.py``.
    """

    def __init__(self, lane: SourceLane, budget: ReadBudget) -> None:
        self.lane = lane
        self._budget = budget
        self._reader: _Reader | None = None
        self._given: dict[Ref, tuple[Sample, int]] = {}
        self._lent = 0  # bytes that ``ready`` has given

    def seek(self, position: Position) -> None:
        """Go on from ``position``; forget what was read."""
        self.close()
        self._reader = _Reader(self.lane, position, self._budget)

    def next(self) -> tuple[Meta, Position]:
        """Return the next sample's metadata and the position after it. Waits for it.

        Raises DataError. After SourceStalled, the next call waits again.
        """
        if self._reader is None:
            raise DataError(f"{self.lane.name}: the feed is closed; seek() opens it")
        given = self._reader.next(1)
        (sample,), (turn,), (place,) = given.samples, given.turns, given.places
        ref = sample.meta.ref
        self._given[ref] = sample, given.sizes[0]
        after = Position(ref.epoch, turn, place) if isinstance(place, int) else place
        return sample.meta, after

    def ready(self) -> ReadSamples | None:
        """Return what ``next`` and ``take`` would return without waiting: some samples, for which
        the caller calls ``give_back``. None: there are none."""
        reader = self._reader
        if reader is None or not reader.ready:
            return None
        given = reader.next(AT_ONCE)
        self._lent += sum(given.sizes)
        return given

    def give_back(self, size: int) -> None:
        """Free bytes of samples that ``ready`` has given since the last ``seek`` or ``close``."""
        size = min(size, self._lent)
        self._lent -= size
        self._budget.give_back(size)

    def take(self, refs: Iterable[Ref]) -> list[Sample]:
        """Return these samples, of those that ``next`` has given, and forget them."""
        taken = [self._given.pop(ref.whole) for ref in refs]
        self._budget.give_back(sum(size for _, size in taken))
        return [sample for sample, _ in taken]

    def drop(self, refs: Iterable[Ref]) -> None:
        """Forget these: other nodes' ranks have them."""
        self.take(refs)

    def again(self, refs: Iterable[Ref]) -> list[Sample]:
        """Read single samples again by their names. Raises DataError."""
        lane = self.lane.copy()
        names = list(refs)
        return _within_patience(lane, lambda: lane.again(names)) if names else []

    def close(self) -> None:
        """Stop reading, and forget what was read."""
        if self._reader is not None:
            self._reader.stop()
            self._reader = None
        self.drop(list(self._given))
        self.give_back(self._lent)


def _within_patience(lane: SourceLane, read: Callable[[], list[Sample]]) -> list[Sample]:
    """Call ``read`` in a thread, which is left behind if it hangs."""
    done: list[list[Sample]] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(read())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            failed.append(error)

    thread = threading.Thread(target=run, name=f"data {lane.name} again", daemon=True)
    thread.start()
    patience = _Patience(lane)
    while thread.is_alive():
        thread.join(patience.left())
    if failed:
        raise failed[0]
    return done[0]
