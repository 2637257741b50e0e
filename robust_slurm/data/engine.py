"""The steps of a plan, one after the other: run by the training process or the data process.

::

    engine = Engine(plan, feeds, shares, dp)  # feeds: {(source, lane): Feed} of all lanes
    engine.seek(state)   # PlanState *before* the next step; first_state(plan.lanes()) at first
    step = engine.next()               # StepData; EndOfData is raised after the last
    engine.close()

``shares``: the indices below ``dp`` (the number of all shares of a step) whose rows are wanted
here. Whoever computes other shares of the same plan comes to the same steps.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from robust_slurm.text import counted

from .construct import construct
from .errors import DataError, EndOfData, SourceStalled
from .lanes.position import Position
from .lanes.use import SourceUse
from .planning.planner import NoStep, PlannedStep, next_step

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from .lanes.feed import Feed
    from .lanes.local import ReadSamples
    from .plan import Plan
    from .planning.state import PlanState
    from .sample import Meta, Ref, Sample

    Lane = tuple[str, int]
    AllocateShare = Callable[[int, str, "tuple[int, ...]", Any], Any]
    """Returns an array for a share's rows, by name, shape and dtype."""


class StepData(NamedTuple):
    """One step of a plan."""

    number: int
    rows: dict[int, dict[str, Any]]
    """The arrays of each wanted share by name, C-contiguous; packed ones [batch, pack]."""
    state: PlanState
    """After it."""
    costs: tuple[float, ...] = ()
    """Costs of the rows of every share, wanted here or not."""


class Engine:
    """Plans each step, and makes the rows of the shares that are wanted here."""

    def __init__(
        self,
        plan: Plan,
        feeds: Mapping[Lane, Feed],
        shares: Collection[int],
        dp: int,
        say: Callable[[str], None] = lambda _line: None,
        alone: bool = False,
        use: SourceUse | None = None,
    ) -> None:
        """``say`` gets a line when a source is waited for, or held back. ``alone``: the rows are
        for one rank, and no other process makes steps of this plan. ``use`` counts what the steps
        take. Raises DataError."""
        wrong = [share for share in shares if not 0 <= share < dp]
        if wrong or not shares:
            raise DataError(f"no share {wrong[0] if wrong else 'at all'}: a step has {dp}")
        self._plan = plan
        self._rules = plan.rules(dp)
        self._feeds = dict(feeds)
        self._shares = sorted(set(shares))
        self._say = say
        self._alone = alone
        self._told = False
        self._held: dict[str, float] = {}  # sources that are held back, until then
        self._use = use or SourceUse()
        self._heads = _FeedHeads(self._feeds, self._use)
        self._state: PlanState | None = None
        self._waiting: set[Ref] = set()  # given by feeds, neither taken nor dropped yet
        self._samples: dict[Ref, Sample] = {}  # taken, with pieces that have no place yet

    def seek(self, state: PlanState) -> None:
        """Go on from this state."""
        self._use.gives_up()
        self._heads.seek(state)
        self._waiting.clear()
        self._samples.clear()
        self._state = state

    def next(self, allocate: AllocateShare | None = None) -> StepData:
        """Return the next step. Raises DataError. After EndOfData, and a SourceStalled that came
        before the step was planned, the state is as before; otherwise call seek next."""
        if self._state is None:
            raise DataError("the engine has no state yet: call seek first")
        step = self._plan_step(self._state)
        own = self._heads.commit()
        self._use.drew(step.drawn)
        self._state = None  # until the step is complete: after a failure, seek must be called
        samples = self._collect(step, own)
        rows = {}
        for share in self._shares:
            make = None if allocate is None else partial(allocate, share)
            rows[share] = construct(self._plan, step.rows[share], samples, make)
        self._state = step.state
        return StepData(step.number, rows, step.state, step.costs)

    def close(self) -> None:
        """Stop reading."""
        for feed in self._feeds.values():
            feed.close()

    def _plan_step(self, state: PlanState) -> PlannedStep:
        now = time.monotonic()
        held_back = {source for source, until in self._held.items() if now < until}
        while True:
            try:
                step = next_step(self._rules, state, self._heads, held_back)
            except SourceStalled as stalled:
                source = self._heads.asked
                self._heads.rewind()
                if self._may_hold_back(source):
                    held_back.add(source)
                    patience = self._plan.sources[source].options.patience
                    self._held[source] = time.monotonic() + patience
                self._stalled(source, stalled, held=source in held_back)
                continue
            except BaseException:
                self._use.gives_up()
                self._heads.rewind()
                raise
            if isinstance(step, PlannedStep):
                self._tell_instead(step)
                return step
            self._heads.rewind()
            if not held_back:
                self._end(state, step)
            held_back.clear()  # there is nothing else: wait for it
            self._held.clear()

    def _end(self, state: PlanState, found: NoStep) -> NoReturn:
        """Raise EndOfData; DataError if there never was a step."""
        what = "piece" if self._plan.pack else "sample"
        if state.step == 0:
            raise DataError(
                f"too few samples: {counted(self._plan.epochs or 0, 'epoch')} of all sources have "
                f"{counted(found.left, what)}, a step of all ranks needs {found.least}; give more "
                "data, or fewer ranks or rows (batch)"
            )
        if found.left and 0 in self._shares:
            self._say(
                f"the plan's epochs are over after {counted(state.step, 'step')}; left out at the "
                f"end: {counted(found.left, what)}, as a step of all ranks needs {found.least}"
            )
        raise EndOfData("the plan's epochs are over")

    def _tell_instead(self, step: PlannedStep) -> None:
        """Say once that other sources are read than the mixture names."""
        if step.instead and not self._told and 0 in self._shares:
            self._told = True
            self._say(
                f"mix({step.number}) names only sources whose epochs are over; read instead, by "
                f"equal parts: {', '.join(step.instead)}. A source that is not to be read must not "
                "be in the plan"
            )

    def _stalled(self, source: str, stalled: SourceStalled, *, held: bool = False) -> None:
        """Say what is done; raise what was raised if the source's policy is "error"."""
        policy = self._plan.sources[source].options.stalled
        if policy == "error":
            raise stalled
        what = "the step goes on without it" if held else "still waiting for it"
        if policy == "hold back" and not self._alone:
            what += ", as several ranks have to come to the same steps"
        self._say(f"source {source}: {stalled}; {what}")

    def _may_hold_back(self, source: str) -> bool:
        """True if the policy is "hold back", and no other process makes steps of this plan: it
        would make other ones."""
        return self._alone and self._plan.sources[source].options.stalled == "hold back"

    def _collect(self, step: PlannedStep, own: dict[Ref, Sample]) -> dict[Ref, Sample]:
        """Return the samples of the wanted rows; the feeds forget those that are done with.
        ``own``: those that were drawn and are here already."""
        rows = (row for share in self._shares for row in step.rows[share])
        refs = [meta.ref for row in rows for meta in row]
        mine = [ref.whole if ref.piece else ref for ref in refs]
        unplaced = {meta.ref.whole for meta in step.state.carried}
        waiting = self._waiting
        if len(own) < len(step.drawn):
            waiting.update(meta.ref for meta in step.drawn if meta.ref not in own)
        found = {**self._samples, **own}
        taken: list[Ref] = []
        before: list[Ref] = []  # drawn before the last seek
        for ref in dict.fromkeys([ref for ref in mine if ref not in found]):
            (taken if ref in waiting else before).append(ref)
        for lane, refs in _by_lane(taken).items():
            found.update((each.meta.ref, each) for each in self._read(lane, refs, taken=True))
        for lane, refs in _by_lane(before).items():
            found.update((each.meta.ref, each) for each in self._read(lane, refs))
        if waiting:
            waiting.difference_update(mine)
        for lane, refs in _by_lane(waiting - unplaced).items():
            self._feeds[lane].drop(refs)
        waiting &= unplaced
        self._samples = {ref: found[ref] for ref in unplaced if ref in found}
        return found

    def _read(self, lane: Lane, refs: list[Ref], *, taken: bool = False) -> list[Sample]:
        """Return samples by their names. Those that are ``taken`` may have to be read again, too,
        where another node has held them."""
        feed = self._feeds[lane]
        while True:
            self._use.waits(lane[0])
            try:
                found = feed.take(refs) if taken else feed.again(refs)
            except SourceStalled as stalled:
                self._stalled(lane[0], stalled)
            else:
                self._use.got()
                return found


class _LaneHead:
    """What a feed has given and the planner has not drawn yet."""

    __slots__ = ("at", "feed", "places", "ready", "samples", "seen", "sizes", "turns")

    def __init__(self, feed: Feed) -> None:
        self.feed = feed
        self.ready: Callable[[], ReadSamples | None] = getattr(feed, "ready", _nothing)
        self.seen: list[Meta] = []
        self.turns: list[int] = []
        self.places: list[int | Position] = []  # as in ReadSamples
        self.samples: list[Sample | None] = []  # None: the feed has it
        self.sizes: list[int] = []
        self.at = 0

    def more(self) -> bool:
        """Add what the feed has read already. Return False if it is to be waited for."""
        found = self.ready()
        if found is None:
            return False
        self.seen += [sample.meta for sample in found.samples]
        self.turns += found.turns
        self.places += found.places
        self.samples += found.samples
        self.sizes += found.sizes
        return True

    def wait(self) -> None:
        """Wait for one sample."""
        meta, after = self.feed.next()
        self.seen.append(meta)
        self.turns.append(after.turn)
        self.places.append(after)
        self.samples.append(None)
        self.sizes.append(0)

    def after(self) -> Position:
        """Return the position after what was drawn last."""
        place = self.places[self.at - 1]
        if isinstance(place, int):
            return Position(self.seen[self.at - 1].ref.epoch, self.turns[self.at - 1], place)
        return place

    def commit(self) -> list[Sample]:
        """Forget those that are drawn; return those that are here."""
        drawn = [each for each in self.samples[: self.at] if each is not None]
        if drawn:
            self.feed.give_back(sum(self.sizes[: self.at]))  # type: ignore[attr-defined]
        for column in (self.seen, self.turns, self.places, self.samples, self.sizes):
            del column[: self.at]
        self.at = 0
        return drawn

    def clear(self) -> None:
        """Forget all."""
        self.at = len(self.seen)
        self.commit()


class _FeedHeads:
    """The next sample of every lane, of what its feed gives. What the planner has seen of a step
    that came to nothing it is shown again."""

    def __init__(self, feeds: Mapping[Lane, Feed], use: SourceUse) -> None:
        self._use = use
        self._lanes: dict[str, dict[int, _LaneHead]] = {}
        for (source, lane), feed in feeds.items():
            self._lanes.setdefault(source, {})[lane] = _LaneHead(feed)
        self.asked = ""
        """The source that was waited for last."""

    def seek(self, state: PlanState) -> None:
        """Go on from this state."""
        for name, each in state.sources.items():
            for lane in range(len(each.lanes)):
                if lane not in self._lanes.get(name, {}):
                    raise DataError(f"source {name}: nobody reads lane {lane}")
        for head in self._heads():
            head.clear()
        for name, each in state.sources.items():
            for lane, position in enumerate(each.lanes):
                self._lanes[name][lane].feed.seek(position)

    def head(self, source: str, lane: int) -> Meta:
        head = self._lanes[source][lane]
        if head.at == len(head.seen) and not head.more():
            self.asked = source
            self._use.waits(source)
            head.wait()
            self._use.got()
        return head.seen[head.at]

    def take(self, source: str, lane: int, epoch: int) -> Meta | int:
        head = self._lanes[source][lane]
        at, seen = head.at, head.seen
        found = seen[at] if at < len(seen) else self.head(source, lane)
        its = found.ref.epoch
        if its > epoch:
            return its
        head.at = at + 1
        return found

    def after(self, source: str, lane: int) -> Position:
        return self._lanes[source][lane].after()

    def rewind(self) -> None:
        """Go back to where the last step ended."""
        for head in self._heads():
            head.at = 0

    def commit(self) -> dict[Ref, Sample]:
        """A step ends here. Return the samples that were drawn and are here."""
        own: dict[Ref, Sample] = {}
        for head in self._heads():
            if head.at:
                drawn = head.commit()
                own.update(zip([each.meta.ref for each in drawn], drawn))  # noqa: B905
        return own

    def _heads(self) -> Iterator[_LaneHead]:
        return (head for lanes in self._lanes.values() for head in lanes.values())


def _nothing() -> None:
    """Give nothing: a feed of another node's lane has no samples here."""


def _by_lane(refs: Iterable[Ref]) -> dict[Lane, list[Ref]]:
    lanes: dict[Lane, list[Ref]] = {}
    for ref in refs:
        lane = ref[:2]
        if lane in lanes:
            lanes[lane].append(ref)
        else:
            lanes[lane] = [ref]
    return lanes
