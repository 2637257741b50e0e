"""The lanes of a plan, each read by the reader that it is dealt to, or by the data process."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import TimeoutError as NotInTime
from typing import TYPE_CHECKING, Any

from robust_slurm.data.errors import DataError, SourceStalled
from robust_slurm.data.exchange.wire import BrokenLine, unpack_samples
from robust_slurm.data.lanes.budget import READERS
from robust_slurm.data.lanes.lane import SourceLane
from robust_slurm.data.lanes.local import LocalFeed
from robust_slurm.data.lanes.window import LaneWindow
from robust_slurm.data.planning.mix import parts_of
from robust_slurm.data.service.readers.channel import ReaderGone
from robust_slurm.data.service.readers.dealing import dealt, lane_loads
from robust_slurm.data.service.readers.reader import lanes_of, worked
from robust_slurm.data.service.readers.staff import ReaderStaff
from robust_slurm.data.service.wanted import as_text, digest
from robust_slurm.data.sources import turn
from robust_slurm.data.steps import lane_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from robust_slurm.data.lanes.budget import ReadBudget
    from robust_slurm.data.lanes.position import Position
    from robust_slurm.data.lanes.tally import Figures, Tally
    from robust_slurm.data.plan import Plan
    from robust_slurm.data.service.readers.channel import ReaderChannel

    Lane = tuple[str, int]

COMING = 8  # steps from the one that is made to the one whose mixture lanes are dealt by
SAME = 3  # deaths at one record: then it is to blame
BACK = 10.0  # s for a reader to be replaced
LOOK = 0.1  # s between two looks at where a reader is
EACH = 3  # windows that a reader is asked for at a time: it has the next one while it sends one
_users = itertools.count()


class _Traceback(Exception):
    """The traceback of an error, from the process in which it was raised."""


class ReaderPool:
    """The lanes of a plan and their readers. ``name``, ``code``: of the plan. ``waited``: returns
    the seconds for which ranks have waited for steps so far. Any thread may call its methods."""

    def __init__(self, plan: Plan, name: str, code: str, waited: Callable[[], float]) -> None:
        self._plan = plan
        self._lanes = {lane: at for at, lane in enumerate(lanes_of(plan))}
        self._budget: ReadBudget | None = None
        self._tallies: dict[Lane, Tally] = {}  # of all that read a lane here
        self._lock = threading.Lock()
        self._dealt: dict[Lane, int] = {}
        self._used: dict[int, ReaderChannel] = {}  # by the lane's user
        self._here: set[Lane] = set()  # read in this process: their samples cannot be sent
        self._dead: Counter[str] = Counter()  # by record
        self._parts: dict[str, int] = {}
        whose = digest(as_text(plan.fingerprint()))
        self.staff = ReaderStaff(
            name, code, whose, len(self._lanes), waited, self._deal, self._blame
        )

    def open_feed(self, lane: Lane, budget: ReadBudget) -> LocalFeed:
        """Return a Feed of a lane that this process or one of its readers reads."""
        made = DealtLane(lane_of(self._plan, lane), self)
        made.tally = self._tallies.setdefault(lane, made.tally)
        self._budget = budget
        budget.readers = max(READERS, EACH * self.staff.count)
        return LocalFeed(made, budget)

    def made(self, step: int) -> None:
        """Note that a step is made: lanes are dealt by the mixture of those to come. Called in the
        thread that plans, since ``mix`` is the user's function; without readers it is not called.
        What it raises is reported when that later step is made, if it ever is."""
        if not self.staff.count:
            return
        with contextlib.suppress(BaseException):
            names = list(self._plan.sources)
            self._parts = parts_of(self._plan.mix(step + COMING), names, f"mix({step + COMING})")

    def window(self, lane: DealtLane) -> LaneWindow | None:
        """Return the next window of a lane; None: it is to be read here. Raises DataError."""
        try:
            return self._window(lane)
        finally:
            if lane.closed:  # perhaps before its reader was asked
                self.leave(lane)

    def stuck(self, lane: DealtLane) -> str | None:
        """Kill the reader that gives nothing of a lane; return words on it. None: none reads it."""
        with self._lock:
            channel = self._used.get(lane.user)
        if channel is None or not channel.reads(self._lanes[lane.name, lane.lane]):
            return None
        place = self.staff.place(channel)
        began, decoded = self.staff.places.of_reader(place) if place is not None else (0.0, "")
        self.staff.end(channel)
        return turn.told(decoded, began) if decoded else ""

    def leave(self, lane: DealtLane) -> None:
        """Have the reader of a lane close its file."""
        with self._lock:
            channel = self._used.pop(lane.user, None)
        if channel is not None:
            channel.tell({"op": "leave", "user": lane.user})

    # -- inside

    def _window(self, lane: DealtLane) -> LaneWindow | None:
        key = (lane.name, lane.lane)
        number, places = self._lanes[key], self.staff.places
        seconds = 0.0
        while key not in self._here:
            place = self._dealt.get(key, number)
            channel = self.staff.channel(place, seconds)
            if lane.closed:
                raise DataError(f"{lane.name}: nobody reads on")
            if channel is None:
                break
            places.reach(number, -1, 0)
            told = {"op": "window", "source": key[0], "lane": key[1], "user": lane.user}
            told |= {"at": lane.at, "tally": lane.tally.state()}
            asked = channel.ask(told, number)
            self._move(lane, channel)
            while True:
                try:
                    message, body = asked.result(LOOK)
                except NotInTime:
                    self._see(lane)
                    continue
                except ReaderGone:
                    self._see(lane)
                    self._judge(lane.where, SAME)
                    seconds = BACK
                    break
                window = self._understood(lane, message, body)
                if window is not None:
                    return window
                break
        self._judge(lane.where, SAME - 1)  # what has killed a reader would kill this process
        return None

    def _move(self, lane: DealtLane, channel: ReaderChannel) -> None:
        """Note who reads a lane from now on."""
        with self._lock:
            before = self._used.get(lane.user)
            self._used[lane.user] = channel
        if before is not None and before is not channel:
            before.tell({"op": "leave", "user": lane.user})

    def _see(self, lane: DealtLane) -> None:
        """Note how far a reader is in a lane."""
        since, part, record = self.staff.places.of_lane(self._lanes[lane.name, lane.lane])
        if place := self._record(lane.name, part, record):
            lane.progress = max(lane.progress, min(since, time.monotonic()))
            lane.where = place

    def _record(self, source: str, part: int, record: int) -> str:
        """Return words for a place; "" for none: a reader may be half through noting it."""
        parts = self._plan.sources[source].parts()
        return f"{parts[part].name}: record {record}" if 0 <= part < len(parts) else ""

    def _understood(
        self, lane: DealtLane, message: dict[str, Any], body: bytes
    ) -> LaneWindow | None:
        """Return the window of an answer, or raise its error; None: it cannot be sent."""
        key = (lane.name, lane.lane)
        if message["op"] == "cannot":
            self._here.add(key)
            return None
        lane.tally.adopt(message["tally"])
        if message["op"] == "failed":
            lane.where = message["where"] or lane.where
            kind = SourceStalled if message["kind"] == "SourceStalled" else DataError
            why = message["why"] if message["kind"] else f"{lane.where}: {message['why']}"
            raise kind(why) from _Traceback(message["trace"])
        self._see(lane)
        self.staff.worked(message["worked"])
        lane.tally.spend(0, message["busy"])
        try:
            samples = unpack_samples(key, message["samples"], body)
        except BrokenLine as error:
            raise DataError(f"{lane.where}: a reader's answer: {error}") from error
        return LaneWindow.of(samples, message["after"])

    def _judge(self, record: str, most: int) -> None:
        """Raise DataError if ``most`` readers have died at a record."""
        if self._dead[record] >= most:
            raise DataError(f"{record}: {self._dead[record]} readers have died here")

    # -- for the staff

    def _blame(self, place: int, lanes: list[int]) -> None:
        """Note at which record a reader has died: that which it decoded, or those that it read."""
        _, decoded = self.staff.places.of_reader(place)
        names = list(self._lanes)
        at = [(names[lane][0], *self.staff.places.of_lane(lane)[1:]) for lane in lanes]
        records = {self._record(*each) for each in at} - {""}
        self._dead.update({decoded} if decoded else records)

    def _deal(self, readers: int) -> None:
        """Deal the lanes to so many readers."""
        if self._budget is not None:
            self._budget.readers = max(READERS, EACH * readers)
        if not readers:
            return
        figures: dict[str, Figures] = {}
        for (name, _), tally in list(self._tallies.items()):
            sums = tally.figures()
            figures[name] = figures[name].plus(sums) if name in figures else sums
        loads = lane_loads(self._plan.lanes(), figures, self._parts, self._plan.pack is not None)
        self._dealt = dealt(loads, readers, self._dealt)


class DealtLane(SourceLane):
    """A lane of which each window is read by the process that ``pool`` chooses.

    Its position and all that has been read are kept in this process: a reader of the next window
    needs nothing from the reader of the last one.
    """

    def __init__(self, lane: SourceLane, pool: ReaderPool) -> None:
        """Take the samples of a lane, from the beginning, and its tally."""
        super().__init__(lane.source, lane.name, lane.lane, lane.lanes, lane.seed, lane.window)
        self.tally = lane.tally
        self._pool = pool
        self.closed = False
        self.user = next(_users)
        """A number of its own: a reader keeps a lane open for each user."""

    def copy(self) -> DealtLane:
        """Return a lane of the same samples, at the beginning, with the same tally."""
        return DealtLane(self, self._pool)

    @property
    def at(self) -> Position:
        """The position at which the next window begins."""
        return self._ahead

    def next_window(self) -> LaneWindow:
        """Return the rest of the window that the position is in, or the next one. Raises
        DataError; the next call tries the same window again."""
        window = self._pool.window(self)
        if window is None:
            began = worked()
            try:
                return super().next_window()
            finally:
                self._pool.staff.worked(worked() - began)
        self.seek(window.after)
        return window

    def stuck(self) -> str:
        """Return words on what the lane waits for, and end the reader that hangs."""
        told = self._pool.stuck(self)
        return super().stuck() if told is None else told

    def close(self) -> None:
        """Have its reader close its file."""
        self.closed = True
        self._pool.leave(self)
