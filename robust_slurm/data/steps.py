"""The steps of a plan, with states as JSON values: what a loader needs, wherever they are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .engine import Engine
from .lanes.budget import ReadBudget
from .lanes.lane import SourceLane
from .lanes.local import LocalFeed
from .planning.state import first_state, from_plain, to_plain
from .say import say

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from .lanes.feed import Feed
    from .lanes.tally import Tally
    from .lanes.use import SourceUse
    from .plan import Plan

    OpenFeeds = Callable[[Plan], Mapping[tuple[str, int], Feed]]
    OpenFeed = Callable[[tuple[str, int], ReadBudget], LocalFeed]

READ_AHEAD = 128 << 20
"""Bytes of samples that a process reads ahead of its steps."""


class Steps(Protocol):
    """The steps of a plan for some shares. All methods may raise DataError."""

    def seek(self, state: Any) -> None:
        """Go on after this state; None: from the beginning."""

    def next(self) -> tuple[int, Mapping[int, Mapping[str, Any]], Any]:
        """Return the next step's number, its rows by share, and the state after it. Raises
        EndOfData after the last."""

    def identity(self) -> dict[str, Any]:
        """Return ``Plan.identity``."""

    def close(self) -> None:
        """Stop reading."""


class LocalSteps:
    """Steps that are made in this process."""

    def __init__(
        self,
        plan: Plan,
        shares: Collection[int],
        dp: int,
        feeds: OpenFeeds | None = None,
        alone: bool = False,
        use: SourceUse | None = None,
        made: Callable[[int], object] | None = None,
    ) -> None:
        """``dp``: number of all shares of a step. ``alone``, ``use``: as for Engine. ``made`` is
        called with each step's number. Lists the sources' parts."""
        self._made = made
        self._plan = plan
        self._engine = Engine(plan, (feeds or local_feeds)(plan), shares, dp, say, alone, use)

    def seek(self, state: Any) -> None:
        lanes = self._plan.lanes()
        if state is None:
            self._engine.seek(first_state(lanes))
        else:
            self._engine.seek(from_plain(state, self._plan.fingerprint(), lanes))

    def next(self) -> tuple[int, Mapping[int, Mapping[str, Any]], Any]:
        step = self._engine.next()
        if self._made is not None:
            self._made(step.number)
        return step.number, step.rows, to_plain(step.state, self._plan.fingerprint())

    def identity(self) -> dict[str, Any]:
        return self._plan.identity()

    def close(self) -> None:
        self._engine.close()


def local_feeds(plan: Plan, open_feed: OpenFeed | None = None) -> Mapping[tuple[str, int], Feed]:
    """Return feeds of all lanes; by default they are read in this process."""
    budget, open_feed = ReadBudget(READ_AHEAD), open_feed or opener(plan)
    lanes = ((name, lane) for name, count in plan.lanes().items() for lane in range(count))
    return {lane: open_feed(lane, budget) for lane in lanes}


def opener(plan: Plan) -> OpenFeed:
    """Return what makes feeds of lanes that are read in this process, with one tally a lane."""
    tallies: dict[tuple[str, int], Tally] = {}

    def open_feed(lane: tuple[str, int], budget: ReadBudget) -> LocalFeed:
        made = lane_of(plan, lane)
        made.tally = tallies.setdefault(lane, made.tally)
        return LocalFeed(made, budget)

    return open_feed


def lane_of(plan: Plan, lane: tuple[str, int]) -> SourceLane:
    """Return a lane of a plan, at its beginning."""
    name, number = lane
    source = plan.sources[name]
    count, window = plan.lanes()[name], source.options.window
    return SourceLane(source, name, number, count, plan.seed, window)
