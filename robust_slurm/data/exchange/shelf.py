"""The lanes that this process reads for itself and others: each once, however many use it.

Users of a lane are named by any object. Each has a position up to which it has passed the lane;
what all have passed is forgotten. Memory: ``room`` bytes and one sample for each reader, and no
more than MOST samples; READERS of a lane, and more only while a user waits for each of them. When
it is full and a user waits for more, the oldest samples are dropped although another user has not
passed them: if one of them is asked for by its name, it is read again.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

from robust_slurm.data.arrays import size_of
from robust_slurm.data.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from robust_slurm.data.lanes.feed import Feed
    from robust_slurm.data.lanes.position import Position
    from robust_slurm.data.sample import Meta, Ref, Sample

    Lane = tuple[str, int]
    Metas = Future[list[tuple[Meta, Position]]]
    Samples = Future[list[Sample]]

MOST = 4096  # samples that a reader holds
READERS = 2  # of a lane: a restart seeks back while others are still ahead


class ReaderEnded(DataError):
    """The reader of a lane has ended; its users may ask again."""


class _ShelfEntry(NamedTuple):
    before: Position
    meta: Meta
    after: Position
    sample: Sample
    size: int


class _Waiting(NamedTuple):
    user: object
    most: int
    answer: Metas


class LaneReader:
    """A thread that reads one lane from a position on. ``change`` guards all of it."""

    def __init__(self, lane: Lane, feed: Feed, start: Position, room: int) -> None:
        self.change = threading.Condition()
        self.users: dict[object, Position] = {}
        self.used = time.monotonic()
        self.over = False
        self._feed = feed
        self._room = room
        self._entries: deque[_ShelfEntry] = deque()
        self._first = 0  # the number of the first entry
        self._numbers: dict[Position, int] = {start: 0}  # of the entry that comes next
        self._samples: dict[Ref, Sample] = {}
        self._end = start
        self._low: Position | None = None  # all users have passed it
        self._size = 0
        self._waiting: list[_Waiting] = []
        name = f"data-exchange {lane[0]}/{lane[1]}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def awaited(self) -> bool:
        """True while a user waits for what it reads next."""
        return bool(self._waiting)

    def holds(self, position: Position) -> bool:
        """Return True if whoever is at ``position`` can go on here."""
        return not self.over and position in self._numbers

    def next(self, user: object, after: Position, passed: Position, most: int) -> Metas:
        """Answer with the samples after a held position, as soon as there is at least one."""
        answer: Metas = Future()
        with self.change:
            if not self.holds(after):
                answer.set_exception(ReaderEnded("it has just ended"))
                return answer
            self.users[user] = passed
            self._low = min(self.users.values())
            self.used = time.monotonic()
            begin = self._numbers[after] - self._first
            if begin < len(self._entries):
                answer.set_result(self._given(begin, most))
            else:
                self._waiting.append(_Waiting(user, most, answer))
            self._forget()
            self.change.notify_all()
        return answer

    def sample(self, ref: Ref) -> Sample | None:
        """Return a sample if it is still here."""
        return self._samples.get(ref)

    def passed(self, user: object, position: Position) -> None:
        """Note how far a user is, which may be further than has been read."""
        with self.change:
            self.users[user] = position
            self._low = min(self.users.values())
            self._forget()
            self.change.notify_all()

    def leave(self, user: object) -> bool:
        """Forget a user. Return True if none is left."""
        with self.change:
            self.users.pop(user, None)
            self._low = min(self.users.values(), default=None)
            self._waiting = [each for each in self._waiting if each.user is not user]
            self._forget()
            self.change.notify_all()
            return not self.users

    def end(self, why: str) -> None:
        self._end_with(ReaderEnded(why))

    # -- the thread

    def _run(self) -> None:
        try:
            self._feed.seek(self._end)
            while self._wait_for_room():
                meta, after = self._feed.next()
                for sample in self._feed.take([meta.ref]):
                    self._add(meta, after, sample)
        except Exception as err:  # noqa: BLE001 - all users are told
            self._end_with(_data_error(err))
        finally:
            self._feed.close()

    def _wait_for_room(self) -> bool:
        with self.change:
            while not self.over and self._full(0, 0) and not self._waiting:
                self.change.wait()
            return not self.over

    def _add(self, meta: Meta, after: Position, sample: Sample) -> None:
        with self.change:
            size = size_of(sample.values)
            self._entries.append(_ShelfEntry(self._end, meta, after, sample, size))
            self._end = after
            self._numbers[after] = self._first + len(self._entries)
            self._samples[meta.ref] = sample
            self._size += size
            waiting, self._waiting = self._waiting, []
            for each in waiting:
                each.answer.set_result(self._given(len(self._entries) - 1, each.most))
            self._forget()

    def _end_with(self, error: Exception) -> None:
        with self.change:
            self.over = True
            waiting, self._waiting = self._waiting, []
            self._entries.clear()
            self._samples.clear()
            for each in waiting:
                each.answer.set_exception(error)
            self.change.notify_all()

    # -- with ``change`` held

    def _given(self, begin: int, most: int) -> list[tuple[Meta, Position]]:
        end = min(len(self._entries), begin + most)
        return [(self._entries[at].meta, self._entries[at].after) for at in range(begin, end)]

    def _full(self, size: int, count: int) -> bool:
        """Return True if there is no room, also when so much of it has been freed."""
        return self._size - size >= self._room or len(self._entries) - count >= MOST

    def _forget(self) -> None:
        """Drop what all have passed, and the oldest of what there is no room for."""
        while self._entries:
            oldest = self._entries[0]
            done = self._low is not None and oldest.after <= self._low
            if not done and not self._full(oldest.size, 1):
                return
            self._entries.popleft()
            self._first += 1
            self._size -= oldest.size
            del self._numbers[oldest.before]
            del self._samples[oldest.meta.ref]


class LaneShelf:
    """All readers of a process. ``open_lane``: makes a Feed of a lane, as often as it is asked to.

    ``room``: see above. All may be called from any thread. What is asked is answered by a Future,
    so that nobody waits here; it fails with DataError.
    """

    def __init__(self, open_lane: Callable[[Lane], Feed], room: int) -> None:
        self._open = open_lane
        self._room = room
        self._lock = threading.Lock()
        self._readers: dict[Lane, list[LaneReader]] = {}
        self._closed = False
        self._again: queue.SimpleQueue[tuple[Lane, list[Ref], Samples] | None]
        self._again = queue.SimpleQueue()
        threading.Thread(target=self._read_again, name="data-again", daemon=True).start()

    def next(self, user: object, lane: Lane, after: Position, passed: Position, most: int) -> Metas:
        """Return what follows ``after`` in the lane: from 1 to ``most`` samples' metadata."""
        with self._lock:
            try:
                reader = self._reader(user, lane, after)
            except DataError as err:
                failed: Metas = Future()
                failed.set_exception(err)
                return failed
            return reader.next(user, after, passed, most)

    def take(self, lane: Lane, refs: Iterable[Ref]) -> Samples:
        """Return samples by their names."""
        names = [ref.whole for ref in refs]
        answer: Samples = Future()
        with self._lock:
            readers = [each for each in self._readers.get(lane, []) if not each.over]
        found = []
        for name in names:
            here = (reader.sample(name) for reader in readers)
            sample = next((each for each in here if each is not None), None)
            if sample is None:
                self._again.put((lane, names, answer))
                return answer
            found.append(sample)
        answer.set_result(found)
        return answer

    def passed(self, user: object, lane: Lane, position: Position) -> None:
        """Note how far a user has come. Of a lane that it has not asked for yet, this node is the
        shadow: it is read from there on."""
        with self._lock:
            for reader in self._readers.get(lane, []):
                before = reader.users.get(user)
                if before is not None and not reader.over and before <= position:
                    reader.passed(user, position)
                    return
            try:
                self._reader(user, lane, position).passed(user, position)
            except DataError:
                pass  # whoever goes on here is told

    def leave(self, user: object, lane: Lane | None = None) -> None:
        """Forget a user, of one lane or of all."""
        with self._lock:
            for name in list(self._readers) if lane is None else [lane]:
                self._leave(user, name)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for readers in self._readers.values():
                for reader in readers:
                    reader.end("the process ends")
            self._readers.clear()
        self._again.put(None)

    # -- with the lock held

    def _reader(self, user: object, lane: Lane, position: Position) -> LaneReader:
        """Return the reader for a user at ``position``, and have it leave all others."""
        if self._closed:
            raise DataError("the process ends")
        readers = self._readers.setdefault(lane, [])
        readers[:] = [each for each in readers if not each.over]
        found = next((each for each in readers if each.holds(position)), None)
        self._leave(user, lane, but=found)
        if found is None:
            free = [each for each in readers if not each.awaited]  # users must not end each other's
            free.sort(key=lambda each: (bool(each.users), each.used))
            for unused in free[: max(0, len(readers) + 1 - READERS)]:
                unused.end("the lane is read elsewhere now")
                readers.remove(unused)
            found = LaneReader(lane, self._open(lane), position, self._room)
            readers.append(found)
        return found

    def _leave(self, user: object, lane: Lane, but: LaneReader | None = None) -> None:
        """A reader without users ends."""
        readers = self._readers.get(lane, [])
        for reader in list(readers):
            if reader is but or user not in reader.users:
                continue
            if reader.leave(user):
                reader.end("nobody uses it")
                readers.remove(reader)

    # -- the thread that reads single samples again

    def _read_again(self) -> None:
        while (job := self._again.get()) is not None:
            lane, names, answer = job
            try:
                feed = self._open(lane)
                try:
                    found = feed.again(names)
                finally:
                    feed.close()
            except BaseException as err:  # noqa: BLE001 - who asked is told, and the next ones too
                answer.set_exception(_data_error(err))
            else:
                answer.set_result(found)


def _data_error(err: BaseException) -> DataError:
    return err if isinstance(err, DataError) else DataError(f"{type(err).__name__}: {err}")
