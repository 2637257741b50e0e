"""The reader processes that there are: started, replaced and ended by one thread."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from robust_slurm.data.errors import DataError
from robust_slurm.data.helper import trim_heaps
from robust_slurm.data.say import say
from robust_slurm.data.service.readers.channel import ReaderChannel
from robust_slurm.data.service.readers.dealing import Spell, readers_wanted
from robust_slurm.data.service.readers.places import SharedPlaces
from robust_slurm.data.service.readers.spawner import ReaderSpawner

if TYPE_CHECKING:
    from collections.abc import Callable

TICK = 0.2  # s
DEAL = 10.0  # s after which lanes are dealt anew
DEATHS, WITHIN = 6, 600.0  # so many within so many seconds: there are no readers any more
_HUNG = 2  # readers that have been killed and have not ended, as a file system hangs: with more,
# none is started


class ReaderStaff:
    """All readers. None is started before ranks wait for want of a processor (``dealing.py``).

    ``name``, ``code``: of the plan; ``plan``: its digest. ``waited``: returns the seconds for which
    ranks have waited for steps so far. ``changed`` is called with the number of readers when it has
    changed, and from time to time; ``blame`` with the place of a reader that has died, and the
    lanes that it was reading.
    """

    def __init__(
        self,
        name: str,
        code: str,
        plan: str,
        lanes: int,
        waited: Callable[[], float],
        changed: Callable[[int], None],
        blame: Callable[[int, list[int]], None],
    ) -> None:
        self._name, self._code, self._plan = name, code, plan
        self._waited, self._changed, self._blame = waited, changed, blame
        self.places = SharedPlaces(lanes)
        self.off = ""
        """Why there are none any more."""
        self._change = threading.Condition()
        self._channels: list[ReaderChannel | None] = []
        self._deaths: deque[float] = deque(maxlen=DEATHS)
        self._spawner: ReaderSpawner | None = None
        self._to_kill: list[int] = []
        self._wished: set[int] = set()  # serial numbers of readers that were ended on purpose
        self._serial = 0
        self._worked = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="data-readers", daemon=True)
        self._thread.start()

    @property
    def count(self) -> int:
        """Number of readers, with those that are being replaced."""
        return len(self._channels)

    def worked(self, seconds: float) -> None:
        """Note for how long a thread had work on a lane."""
        with self._change:
            self._worked += seconds

    def channel(self, place: int, seconds: float) -> ReaderChannel | None:
        """Return the reader of a place, or another while it is being replaced, after ``seconds`` of
        waiting for one; None: there is none."""
        until = time.monotonic() + seconds
        with self._change:
            while self._channels and not self.off:
                at = place % len(self._channels)
                found = [each for each in self._channels[at:] + self._channels[:at] if each]
                left = until - time.monotonic()
                if found or left <= 0:
                    return found[0] if found else None
                self._change.wait(left)
            if self._closed:
                raise DataError("the process ends")  # and reads nothing any more
        return None

    def place(self, channel: ReaderChannel) -> int | None:
        """Return the place of a reader; None: it has gone."""
        with self._change:
            return self._channels.index(channel) if channel in self._channels else None

    def end(self, channel: ReaderChannel) -> None:
        """Kill a reader; another takes its place if it is to be."""
        with self._change:
            self._wished.add(channel.serial)
            self._to_kill.append(channel.serial)
        channel.close()

    def close(self) -> None:
        """End all readers."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join()

    # -- the threads of channels

    def _gone(self, channel: ReaderChannel, lanes: list[int]) -> None:
        """Note where a reader has died, before another one reads on there."""
        with self._change:
            died = channel.serial not in self._wished and not self._closed
            if died:
                self._died()
            if channel in self._channels:
                place = self._channels.index(channel)
                if died:
                    self._blame(place, lanes)
                self._channels[place] = None
            self._change.notify_all()

    def _died(self) -> None:
        now = time.monotonic()
        self._deaths.append(now)
        if len(self._deaths) == DEATHS and now - self._deaths[0] < WITHIN:
            self.off = f"they have died {DEATHS} times within {WITHIN:.0f} s"
            say(f"no lanes are read by readers any more: {self.off}")

    # -- the thread

    def _run(self) -> None:
        wanted, lasted, waited, worked = 0, 0.0, self._waited(), 0.0
        last = told = time.monotonic()
        while not self._closed:
            try:
                self._listen()
                now = time.monotonic()
                lasted += min(now - last, 5 * TICK)  # if stopped, it was not idle
                last = now
                spell = Spell(lasted, self._waited() - waited, self._worked - worked)
                starts = self.count != wanted
                found = readers_wanted(wanted, spell, len(os.sched_getaffinity(0)))
                if self.off or found is not None or starts:
                    wanted = 0 if self.off else wanted if starts or found is None else found
                    waited, worked, lasted = self._waited(), self._worked, 0.0
                if self._adjust(wanted) or now - told > DEAL:
                    told = now
                    self._changed(self.count)
                    trim_heaps()  # of lanes that readers have taken over, for one
            except (OSError, RuntimeError) as error:  # RuntimeError: no thread for a channel
                self._fail(str(error))
        self._stop()

    def _listen(self) -> None:
        """Let some time pass, and hear of readers that have ended. Raises OSError."""
        if self._spawner is None:
            with self._change:
                self._change.wait_for(lambda: self._closed, TICK)
            return
        ready = self._spawner.plan
        news = self._spawner.news(TICK)
        if self._spawner.plan not in (ready, self._plan):
            self.off = "they find other files than the data process"
            say(f"no lanes are read by readers: {self.off}")
        if news is not None and news[0] not in self._wished:
            say(f"a reader {news[1]}; {'the data process' if self.off else 'another'} goes on")

    def _adjust(self, wanted: int) -> bool:
        """Have so many readers; return True if that is another number. Raises OSError."""
        before = self.count
        if not wanted:
            self._stop()
            return before != 0
        if self._spawner is None:
            self._spawner = ReaderSpawner(self._name, self._code, self.places)
        spawner = self._spawner
        spawner.use(os.sched_getaffinity(0))
        if not spawner.plan:
            return False
        with self._change:
            surplus = [each for each in self._channels[wanted:] if each is not None]
            del self._channels[wanted:]
            self._channels += [None] * (wanted - len(self._channels))
            missing = [at for at, each in enumerate(self._channels) if each is None]
        for channel in surplus:
            self.end(channel)
        with self._change:
            kill, self._to_kill = self._to_kill, []
        for serial in kill:
            spawner.kill(serial)
        for at in missing:
            if len(spawner.living & self._wished) <= _HUNG:
                self._serial += 1
                sock = spawner.start(self._serial, at)
                with self._change:  # one that ends at once is not gone before it is here
                    self._channels[at] = ReaderChannel(sock, self._serial, self._gone)
                    self._change.notify_all()
        return before != wanted

    def _fail(self, why: str) -> None:
        """Note that the program that makes readers has ended, and all readers with it."""
        if self._spawner is None or not self._spawner.plan:
            self.off = f"they do not start: {why}"
        say(f"{self.off or f'the process that makes readers has ended: {why}'}")
        self._stop()
        with self._change:
            self._died()

    def _stop(self) -> None:
        with self._change:
            channels, self._channels = self._channels, []
            self._wished.update(each.serial for each in channels if each is not None)
            self._change.notify_all()
        for channel in channels:
            if channel is not None:
                channel.close()
        if self._spawner is not None:
            self._spawner.close()
            self._spawner = None
