"""One lane: the samples of a source's share in their shuffled order, from any position."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from robust_slurm.data.arrays import tokens_of
from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.lanes import order, outages
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.lanes.tally import Tally
from robust_slurm.data.sample import Meta, Ref, Sample
from robust_slurm.data.sources.base import BadRecord
from robust_slurm.data.sources.turn import long_decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from robust_slurm.data.sources.base import Source

PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds before a part is opened again after an error; then the last
GONE = 10.0  # seconds to wait for a file that is not there
STOPPED = 10.0  # seconds; a pause that takes so much longer: the job was suspended meanwhile


class _RecordWindow(NamedTuple):
    """Records of one part that are shuffled together."""

    epoch: int
    turn: int
    part: int
    number: int
    samples: dict[int, Sample]  # by their index in the window


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
        self.where = "before its first record"
        self.progress = time.monotonic()
        self._tries_again = False  # after an error of its files
        self.seek(Position())

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

    def next_window(self) -> list[tuple[Sample, Position]]:
        """Return the rest of the window that the position is in, or the next one.

        Raises DataError; the next call tries the same window again.
        """
        try:
            window = next(self._windows)
        except BaseException:
            self._windows = self._shuffled(self._ahead)  # a generator that raised has ended
            raise
        self._ahead = window[-1][1]
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
            for index, values in self._read(part, record):
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

    def _shuffled(self, position: Position) -> Iterator[list[tuple[Sample, Position]]]:
        """Yield each window in its order, from ``position`` on."""
        taken = position.taken
        for window, after in self._in_windows(position):
            first = window.number * self.window
            place = (window.epoch, window.turn)
            begun = taken - first if place == (position.epoch, position.turn) else 0
            slots = order.window_order(
                self.window, self.seed, self.name, window.epoch, window.part, window.number
            )
            given = [
                (window.samples[index], Position(*place, first + slot + 1))
                for slot, index in enumerate(slots)
                if slot >= begun and index in window.samples
            ]
            window.samples.clear()  # what is given belongs to the taker alone
            if given:
                given[-1] = (given[-1][0], after)
                yield given

    def _in_windows(self, position: Position) -> Iterator[tuple[_RecordWindow, Position]]:
        """Yield windows with a record, and where the next of them begins."""
        window: _RecordWindow | None = None
        for epoch, turn, part, record, sample in self._in_passes(position):
            number, index = divmod(record, self.window)
            if window is None or (epoch, turn, number) != (window[0], window[1], window.number):
                if window is not None:
                    yield window, Position(epoch, turn, number * self.window)
                window = _RecordWindow(epoch, turn, part, number, {})
            window.samples[index] = sample

    def _in_passes(self, position: Position) -> Iterator[tuple[int, int, int, int, Sample]]:
        """Yield (epoch, turn, part, record, sample) in the files' order, pass after pass."""
        sizes = [part.size for part in self.source.parts()]
        epoch, begin = position.epoch, position.turn
        start = position.taken // self.window * self.window
        while True:
            parts = order.parts_of_lane(sizes, self.seed, self.name, epoch, self.lane, self.lanes)
            empty = (begin, start) == (0, 0)
            for turn in range(begin, len(parts)):
                part = parts[turn]
                for record, values in self._read(part, start):
                    bad = values if isinstance(values, BadRecord) else None
                    self.tally.add(epoch, turn, record, bad)
                    if values is None or isinstance(values, BadRecord):
                        continue
                    empty = False
                    ref = Ref(self.name, self.lane, epoch, part, record)
                    yield epoch, turn, part, record, Sample(Meta(ref, tokens_of(values)), values)
                start = 0
            if empty:
                self._expect_a_record()
            epoch, begin, start = epoch + 1, 0, 0

    def _expect_a_record(self) -> None:
        """Raise DataError if no lane will ever have a sample."""
        for part in range(len(self.source.parts())):
            for _, values in self._read(part, 0):
                if values is not None and not isinstance(values, BadRecord):
                    return
        raise DataError(f"{self.name}: no sample in {len(self.source.parts())} parts")

    def _read(
        self, part: int, start: int
    ) -> Iterator[tuple[int, dict[str, object] | BadRecord | None]]:
        """Read a part from record ``start`` on; open it again after errors of its file system."""
        name = self.source.parts()[part].name
        tries = 0
        since = time.monotonic()
        while True:
            self.where = f"{name}: record {start}"
            try:
                for index, values in self.source.read(part, start):
                    start, tries = index + 1, 0
                    if self._tries_again:
                        self._tries_again = False
                        outages.end(self, self.name)
                    self.progress = time.monotonic()
                    self.where = f"{name}: record {start}"
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
