"""RemoteFeed: a lane as one node sees it, wherever it is read at the moment."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import TimeoutError as NotInTime
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from robust_slurm.data.errors import DataError
from robust_slurm.data.exchange.link import CannotGive
from robust_slurm.data.exchange.shelf import ReaderEnded
from robust_slurm.data.lanes.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from robust_slurm.data.exchange.link import LaneLink, Metas, Samples
    from robust_slurm.data.sample import Meta, Ref, Sample

AHEAD = 256  # samples whose metadata is asked for at once
LOW = 64  # samples left when more is asked for
TELL = 64  # samples between two words to the shadow
ANSWER = 30.0  # s for another node that lives to answer: its source may be slow, or away
AVOIDED = 30.0  # s for which a node that could not give something is not asked
_PIECES = 1024  # samples asked for at once


class _Asked(NamedTuple):
    link: LaneLink
    answer: Metas


class RemoteFeed:
    """A Feed (``lanes/feed.py``) of a lane that the first of some nodes reads.

    ``links``: the nodes in the lane's order of preference, this one among them. The first that
    answers is asked. The second, its shadow, is told how far this node is, so that it has read as
    far ahead when it is asked. ``own``: this process, which is asked when neither answers, and
    always once samples have values that cannot be sent. All nodes have the same samples in the same
    order, so that any may follow any other at any sample.
    """

    def __init__(
        self,
        lane: tuple[str, int],
        links: Callable[[], Iterable[LaneLink]],
        own: LaneLink,
    ) -> None:
        self.lane = lane
        self.moves = 0
        """Number of times that another node was asked, as the one before could not answer."""
        self._links = links
        self._own = own
        self._avoided: dict[LaneLink, float] = {}  # until then
        self._used: set[LaneLink] = set()
        self._ready: deque[tuple[Meta, Position]] = deque()
        self._open: dict[Ref, Position] = {}  # given, not taken; the position before it
        self._given = self._end = Position()  # after what was given, and after what is ready
        self._asked: _Asked | None = None
        self._untold = 0
        self._closed = True

    def seek(self, position: Position) -> None:
        """Go on from ``position``; forget what was read."""
        self._ready.clear()
        self._open.clear()
        self._given = self._end = position
        self._asked = None
        self._untold = 0
        self._closed = False
        for link in islice(self._links(), 2):
            link.wait_up()
        self._ask_ahead()
        self._tell()

    def next(self) -> tuple[Meta, Position]:
        """Return the next sample's metadata and the position after it. Waits for it."""
        if self._closed:
            raise DataError(f"{self.lane[0]}: the feed is closed; seek() opens it")
        while not self._ready:
            self._receive()
        meta, after = self._ready.popleft()
        self._open[meta.ref] = self._given
        self._given = after
        self._untold += 1
        if self._untold >= TELL:
            self._tell()
        if len(self._ready) < LOW:
            self._ask_ahead()
        return meta, after

    def take(self, refs: Iterable[Ref]) -> list[Sample]:
        """Return these samples, of those that ``next`` has given, and forget them."""
        names = list(refs)
        samples = self.again(names)
        self.drop(names)
        return samples

    def drop(self, refs: Iterable[Ref]) -> None:
        """Forget these: other nodes' ranks have them."""
        for ref in refs:
            del self._open[ref.whole]

    def again(self, refs: Iterable[Ref]) -> list[Sample]:
        """Return single samples by their names."""
        names = [ref.whole for ref in refs]
        samples: list[Sample] = []
        while len(samples) < len(names):
            link = self._choose()
            wanted = names[len(samples) : len(samples) + _PIECES]
            found = self._answer(link, link.take(self.lane, wanted))
            if found is None:
                continue
            if [sample.meta.ref for sample in found] != wanted[: len(found)] or not found:
                self._avoid(link)  # it is not what was asked for
                continue
            samples += found
        return samples

    def close(self) -> None:
        """Stop reading."""
        self._closed = True
        self._ready.clear()
        self._open.clear()
        self._asked = None
        for link in self._used:
            link.leave(self.lane)
        self._used.clear()

    # -- inside

    def _present(self) -> list[LaneLink]:
        """Return the node that is to read the lane and its shadow: the first two that can."""
        now = time.monotonic()
        able = (each for each in self._links() if each.up and self._avoided.get(each, 0.0) <= now)
        return list(islice(able, 2))

    def _choose(self) -> LaneLink:
        return next(iter(self._present()), self._own)

    def _ask_ahead(self) -> None:
        if self._asked is None:
            link = self._choose()
            self._used.add(link)
            passed = next(iter(self._open.values()), self._given)
            self._asked = _Asked(link, link.next(self.lane, self._end, passed, AHEAD))

    def _receive(self) -> None:
        """Wait for more metadata, from whoever gives it."""
        self._ask_ahead()
        if self._asked is not None:
            asked, self._asked = self._asked, None
            more = self._answer(asked.link, asked.answer)
            if more:
                self._ready.extend(more)
                self._end = more[-1][1]
                self._tell()

    def _answer(self, link: LaneLink, answer: Metas | Samples) -> Any:
        """Return what a node answers; None if another is to be asked. Raises DataError."""
        try:
            return answer.result(None if link is self._own else ANSWER)
        except ReaderEnded:
            return None  # asked again
        except CannotGive:
            self.moves += 1
            self._links = lambda: [self._own]
            return None
        except (DataError, NotInTime):
            if link is self._own:
                raise
            self._avoid(link)
            return None

    def _avoid(self, link: LaneLink) -> None:
        self._avoided[link] = time.monotonic() + AVOIDED
        self.moves += 1
        if link.up:
            link.leave(self.lane)

    def _tell(self) -> None:
        """Tell the shadow how far this node is, and nodes that are not needed any more to stop."""
        self._untold = 0
        passed = next(iter(self._open.values()), self._given)
        present = self._present()
        asked = self._asked.link if self._asked is not None else None
        for link in self._used.difference(present, [asked]):
            link.leave(self.lane)
        self._used.intersection_update([*present, *([asked] if asked is not None else [])])
        for link in present[1:]:
            self._used.add(link)
            link.passed(self.lane, passed)
