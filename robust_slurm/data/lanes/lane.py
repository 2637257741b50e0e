"""One lane: the samples of a source's share in their shuffled order, from any position."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from robust_slurm.data.arrays import tokens_of
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import order, outages
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.lanes.tally import Tally
from robust_slurm.data.lanes.window import LaneWindow
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.data.sources.base import BadRecord
from robust_slurm.data.sources.turn import long_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from robust_slurm.data.sources.base import Source

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before a part is opened again after an error; then the last
GONE = 10.0  # seconds to wait for a file that is not there
STOPPED = 10.0  # seconds; a pause that takes so much longer: the job was suspended meanwhile


class SourceLane:
    """An endless iterator of (sample, position after it).

    It reads its parts of a pass one after the other, a window of records at a time, and gives
    each window in shuffled order; then the next pass. Which parts, and which order, follows from
    the arguments, the pass and the part alone (``order.py``).

    A lane has no thread, lock or process of its own, and none of its state is needed elsewhere:
    a lane with the same arguments gives the same samples from a position. So it may run in a thread
    (``local.py``), in a child process, or on another node. ``tally`` and ``where``
    are those of this process. Memory: the records of one window, and one more.
    """

    def __init__(
        self, source: Source, name: str, lane: int, lanes: int, seed: int, window: int
    ) -> None:
        if not 0 <= lane < lanes or window < 1:
            raise DataError(f"{name}: no lane {lane} of {lanes} with windows of {window} records")
        self.source, self.name, self.lane, self.lanes = source, name, lane, lanes
        self.seed, self.window = seed, window
        self.tally = Tally(source.options)
        self._where: str | tuple[str, int] = "before its first record"
        self.progress = time.monotonic()
        self._tries_again = False  # after an error of its files
        self.seek(Position())

    @property
    def where(self) -> str:
        """The place that is read, in words."""
        where = self._where
        return where if isinstance(where, str) else f"{where[0]}: record {where[1]}"

    @where.setter
    def where(self, place: str) -> None:
        self._where = place

    def copy(self) -> SourceLane:
        """Return a lane of the same samples, at the beginning, with the same tally."""
        other = SourceLane(self.source, self.name, self.lane, self.lanes, self.seed, self.window)
        other.tally = self.tally
        return other

    def seek(self, position: Position) -> None:
        """Go on from ``position``. Reads nothing yet; then at most one window again."""
        self._ahead = position  # after the window that was read last
        self._windows = self._shuffled(position)
        self._samples: Iterator[tuple[Sample, Position]] = iter(())

    def __iter__(self) -> SourceLane:
        return self

    def __next__(self) -> tuple[Sample, Position]:
        for given in self._samples:
            return given
        self._samples = iter(self.next_window())
        return next(self._samples)

    def next_window(self) -> LaneWindow:
        """Return the rest of the window that the position is in, or the next one.

        Raises DataError; the next call tries the same window again.
        """
        try:
            window = next(self._windows)
        except BaseException:
            self._windows = self._shuffled(self._ahead)  # a generator that raised has ended
            raise
        self._ahead = window.after
        return window

    def again(self, refs: Iterable[Ref]) -> list[Sample]:
        """Read single samples by their names; pieces of a sample are that sample. Any thread."""
        refs = list(refs)
        found: dict[tuple[int, int], Sample] = {}
        wanted = sorted({(ref.part, ref.record) for ref in refs})
        while wanted:
            part, record = wanted[0]
            run = {record}
            for other, later in wanted[1:]:
                if other != part or later - max(run) > self.window:
                    break
                run.add(later)
            wanted = wanted[len(run) :]
            for index, values in self._read(part, record, self.source.read):
                if index in run and values is not None and not isinstance(values, BadRecord):
                    ref = Ref(self.name, self.lane, 0, part, index)
                    found[part, index] = Sample(Meta(ref, tokens_of(values)), values)
                if index >= max(run):
                    break
        try:
            samples = [(ref, found[ref.part, ref.record]) for ref in refs]
        except KeyError as missing:
            part, record = missing.args[0]
            name = self.source.parts()[part].name
            raise DataError(f"{name}: record {record} cannot be read again") from None
        return [
            Sample(Meta(ref.whole, sample.meta.tokens), sample.values) for ref, sample in samples
        ]

    def stuck(self) -> str:
        """Return words on what the lane waits for. Called when its patience is over."""
        return long_decode()

    def close(self) -> None:
        """Give back what the lane has in other processes: nobody reads on."""

    def _shuffled(self, position: Position) -> Iterator[LaneWindow]:
        """Yield each window in its order, from ``position`` on."""
        for place, number, values, after in self._in_windows(position):
            first = number * self.window
            done = position.taken - first if place[:2] == position[:2] else 0
            epoch, _, part = place
            slots = order.window_order(self.window, self.seed, self.name, epoch, part, number)
            given = [
                (first + slot + 1, index)
                for slot, index in enumerate(slots)
                if slot >= done and index in values
            ]
            if given:
                taken, records = [each[0] for each in given], [first + each[1] for each in given]
                own = [values[index] for _, index in given]
                values.clear()  # what is given belongs to the taker alone
                yield LaneWindow((self.name, self.lane), place, records, own, taken, after)

    def _in_windows(
        self, position: Position
    ) -> Iterator[tuple[tuple[int, int, int], int, dict[int, Any], Position]]:
        """Yield (epoch, turn, part), number, and values by their index in it, of each window with
        a record, and where the next of them begins. In the files' order, pass after pass."""
        read = getattr(self.source, "read_quickly", self.source.read)
        sizes = [part.size for part in self.source.parts()]
        epoch, begin = position.epoch, position.turn
        start = position.taken // self.window * self.window
        window: tuple[tuple[int, int, int], int, dict[int, Any]] | None = None
        samples: dict[int, Any] = {}  # of the window
        while True:
            parts = order.parts_of_lane(sizes, self.seed, self.name, epoch, self.lane, self.lanes)
            empty = (begin, start) == (0, 0)
            for turn in range(begin, len(parts)):
                place = (epoch, turn, parts[turn])
                first = end = 0  # the records of the window
                well: list[int] = []  # records that are not counted yet
                try:
                    for record, values in self._read(parts[turn], start, read):
                        if isinstance(values, BadRecord):
                            self.tally.add_well(epoch, turn, well)
                            well = []
                            self.tally.add(epoch, turn, record, values)
                            continue
                        well.append(record)
                        if values is None:
                            continue
                        if not first <= record < end:
                            self.tally.add_well(epoch, turn, well)
                            well = []
                            number = record // self.window
                            first, end = number * self.window, (number + 1) * self.window
                            if window is not None:
                                done, window = window, None
                                yield *done, Position(epoch, turn, first)
                            samples = {}
                            window = (place, number, samples)
                            empty = False
                        samples[record - first] = values
                finally:
                    self.tally.add_well(epoch, turn, well)
                start = 0
            if empty:
                self._expect_a_record()
            epoch, begin, start = epoch + 1, 0, 0

    def _expect_a_record(self) -> None:
        """Raise DataError if no lane will ever have a sample."""
        for part in range(len(self.source.parts())):
            for _, values in self._read(part, 0, self.source.read):
                if values is not None and not isinstance(values, BadRecord):
                    return
        raise DataError(f"{self.name}: no sample in {len(self.source.parts())} parts")

    def _read(
        self, part: int, start: int, read: Callable[[int, int], Iterator[tuple[int, Any]]]
    ) -> Iterator[tuple[int, Any]]:
        """``read`` a part from ``start`` on; open it again after errors of its file system."""
        name = self.source.parts()[part].name
        tries = 0
        since = time.monotonic()
        while True:
            self._where = name, start
            try:
                for index, values in read(part, start):
                    start, tries = index + 1, 0
                    if self._tries_again:
                        self._tries_again = False
                        outages.end(self, self.name)
                    self.progress = time.monotonic()
                    self._where = name, start
                    yield index, values
                return
            except OSError as error:
                patience = self.source.options.patience
                if isinstance(error, FileNotFoundError):
                    patience = min(patience, GONE)
                if tries == 0:
                    since = time.monotonic()
                waited = time.monotonic() - since
                why = error.strerror or error
                if waited >= patience:
                    raise SourceStalled(
                        f"{self.name}: {name}: record {start}: {why}; tried for {waited:.0f} s"
                    ) from error
                if tries == 1 and not self._tries_again:  # it was not over at once
                    self._tries_again = True
                    what = f"{self.where}: {why}"
                    outages.begin(self, self.name, what, patience, self.source.options)
                pause = min(PAUSES[min(tries, len(PAUSES) - 1)], patience - waited)
                paused = time.monotonic()
                time.sleep(pause)
                if time.monotonic() - paused > pause + STOPPED:
                    since = time.monotonic()
                tries += 1
