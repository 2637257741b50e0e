"""The planner: which samples the next step has, in which rows, for which share (pure).

It sees metadata alone. Steps are a function of the arguments, the state and the lanes' samples:
every process that runs it comes to the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta, Ref

from . import mix as mixture
from .balance import into_groups, into_rows
from .state import PlanState, SourceState

MOST_EMPTY = 100_000  # samples without a token, one after the other
Rows = tuple[tuple[Meta, ...], ...]
"""The samples, or pieces of them, of each row of a share, in their order."""


class Heads(Protocol):
    """The next sample of every lane."""

    def head(self, source: str, lane: int) -> Meta:
        """Return it; the same one until ``take``."""

    def take(self, source: str, lane: int, epoch: int) -> Meta | int:
        """Return what ``head`` would, and go to the lane's next sample. If it is of a later pass
        than ``epoch``, do nothing and return that pass."""

    def after(self, source: str, lane: int) -> Position:
        """Return the position after the sample that was taken last for this step."""


class Rules(NamedTuple):
    """A plan's rules for steps."""

    mix: Callable[[int], Any]
    cost: Callable[[Meta], float]
    pack: int | None
    long: str
    fill: float
    batch: int
    shares: int
    epochs: int | None
    mix_changes: bool = True
    """``mix`` is a function of the step, not the same weights in all."""


class PlannedStep(NamedTuple):
    """One step."""

    number: int
    rows: tuple[Rows, ...]
    """The rows of each share, 0 first."""
    drawn: tuple[Meta, ...]
    """Whole samples that were drawn for it; ``state.carried`` has those without a place."""
    costs: tuple[float, ...]
    """The cost of each share's rows."""
    state: PlanState
    """After it."""
    instead: tuple[str, ...] = ()
    """Sources that were drawn from because those that the mixture names were at their end."""


class NoStep(NamedTuple):
    """The end: the epochs are over, and the samples that are left do not suffice for a step."""

    left: int
    """Samples, or pieces of them, that are left."""
    least: int
    """Number of them that a step needs."""


def next_step(
    rules: Rules, state: PlanState, heads: Heads, held_back: Collection[str] = ()
) -> PlannedStep | NoStep:
    """Return the next step, or NoStep if the epochs are over. ``held_back``: sources that nothing
    is drawn from now; NoStep also if the others do not suffice for whole rows. Raises DataError."""
    drawing = _Drawing(rules, state, heads, held_back)
    drawing.draw()
    least, ready = drawing.least, drawing.ready
    if drawing.count < least or (held_back and not drawing.full):
        return NoStep(drawing.count, least)
    costs = _costs(rules.cost, ready)
    if rules.pack:
        packed = into_rows(
            [meta.tokens for meta in ready], costs, drawing.carried,
            rules.shares, rules.batch, rules.pack,
        )  # fmt: skip
        places, left = packed.rows, packed.left
    else:
        places = [[[item] for item in group] for group in into_groups(costs, rules.shares)]
        left = []
    return PlannedStep(
        state.step,
        tuple(tuple(tuple(ready[item] for item in row) for row in share) for share in places),
        tuple(drawing.drawn),
        tuple(math.fsum(costs[item] for row in share for item in row) for share in places),
        PlanState(state.step + 1, drawing.sources(), drawing.unplaced(left)),
        drawing.instead,
    )


class _Drawing:
    """Draws samples for one step."""

    def __init__(
        self, rules: Rules, state: PlanState, heads: Heads, held_back: Collection[str]
    ) -> None:
        self._rules = rules
        self._held_back = held_back
        self._places = {name: _Place(name, each, heads) for name, each in state.sources.items()}
        self._credits = {name: each.credit for name, each in state.sources.items()}
        where = f"mix({state.step})"
        parts = mixture.parts_of(rules.mix(state.step), list(state.sources), where)
        self._parts = {name: part for name, part in parts.items() if name not in held_back}
        self._rows = rules.shares * rules.batch
        self._whole_rows = 0
        self._tokens = 0
        self._behind: list[tuple[tuple[int, int], Meta]] = []
        self.drawn: list[Meta] = []
        self.instead: tuple[str, ...] = ()
        self.ready: list[Meta] = []
        """Samples, and pieces of them, for the step's rows."""
        self.count = 0
        """Number of all samples and pieces, with those that no row could have a place for."""
        for meta in state.carried:
            self._add(meta)
        self.carried = len(self.ready)
        """Number of the first of ``ready``, which were carried over."""
        self.least = rules.shares if rules.pack else self._rows
        """Samples, or pieces, that a step needs: each share has to have one."""
        self._enough = self._rows * rules.pack * rules.fill if rules.pack else 0.0  # tokens

    @property
    def full(self) -> bool:
        """The step has as many samples as it should."""
        return self._tokens >= self._enough and self.count >= self.least

    def sources(self) -> dict[str, SourceState]:
        """Return the sources' states after what was drawn."""
        return {name: place.state(self._credits[name]) for name, place in self._places.items()}

    def unplaced(self, left: Collection[int]) -> tuple[Meta, ...]:
        """Return what is carried over, oldest first. ``left``: of ``ready``, without a place."""
        waiting = [((item, 0), self.ready[item]) for item in left] + self._behind
        waiting.sort(key=lambda each: each[0])
        return tuple(_joined((meta for _, meta in waiting), self._rules.pack))

    def draw(self) -> None:
        """Draw until the step's rows are full, or all sources have come to their end."""
        pack, epochs = self._rules.pack, self._rules.epochs
        empty, name = 0, ""
        while not (self._tokens >= self._enough and self.count >= self.least):
            if not name:
                if not self._parts and not self._others():
                    return
                name = mixture.choose(self._parts, self._credits)
            meta = self._places[name].draw(epochs)
            if meta is None:
                del self._parts[name]
                name = ""
                continue
            self.drawn.append(meta)
            tokens = meta.tokens
            if pack is None or 0 < tokens < pack:  # as nearly all are: one piece, itself
                self._tokens += tokens
                self.ready.append(meta)
                self.count += 1
                amount, empty = tokens if pack else 1, 0
            else:
                pieces = pieces_of(meta, pack, self._rules.long)
                amount = sum(piece.tokens for piece in pieces)
                empty = 0 if amount else empty + 1
                if empty > MOST_EMPTY:
                    raise DataError(f"source {name}: {MOST_EMPTY} samples in a row have no token")
                for piece in pieces:
                    self._add(piece)
            name = mixture.book(self._parts, self._credits, name, amount)

    def _others(self) -> bool:
        """Go on with all sources that are not at their end, if the mixture that names others is a
        function of the step: in another step it may name these. Return False if there are none."""
        if self._held_back or not self._rules.mix_changes:
            return False
        epochs = self._rules.epochs
        left = [name for name, place in self._places.items() if place.has_more(epochs)]
        if left:
            self.instead = tuple(left)
            self._parts = mixture.parts_of(dict.fromkeys(left, 1), left, "")
        return bool(left)

    def _add(self, meta: Meta) -> None:
        """Have a sample placed: of a long document's whole rows no more than there are rows."""
        pack = self._rules.pack
        self._tokens += meta.tokens
        if pack is None or meta.tokens < pack:
            self.ready.append(meta)
            self.count += 1
            return
        whole = meta.tokens // pack
        fit = min(whole, self._rows - self._whole_rows)
        self._whole_rows += fit
        self.count += whole
        for number in range(fit):
            self.ready.append(Meta(_piece(meta.ref, number), pack))
        if fit < whole:
            rest = Meta(_piece(meta.ref, fit), (whole - fit) * pack)
            self._behind.append(((len(self.ready) - 1, 1), rest))


class _Place:
    """The place in one source, of which samples are drawn."""

    def __init__(self, name: str, state: SourceState, heads: Heads) -> None:
        self._name = name
        self._heads = heads
        self._lanes = list(state.lanes)
        self._taken: set[int] = set()  # lanes that were drawn from
        self._epoch, self._turn, self._drawn = state.epoch, state.turn, state.drawn

    def state(self, credit: int) -> SourceState:
        for lane in self._taken:
            self._lanes[lane] = self._heads.after(self._name, lane)
        return SourceState(tuple(self._lanes), self._epoch, self._turn, credit, self._drawn)

    def draw(self, epochs: int | None) -> Meta | None:
        """Take the next sample, of the lanes in turn; None after the last pass.

        A lane that has come to its end waits for the others: every sample is drawn once before
        any is drawn twice.
        """
        while epochs is None or self._epoch < epochs:
            earliest = math.inf
            lane = self._turn
            for _ in self._lanes:
                found = self._heads.take(self._name, lane, self._epoch)
                this, lane = lane, lane + 1
                if lane == len(self._lanes):
                    lane = 0
                if not isinstance(found, int):
                    self._taken.add(this)
                    self._turn = lane
                    self._drawn += 1
                    return found
                earliest = min(earliest, found)
            self._epoch = int(earliest)  # lanes may have no sample in many passes
        return None

    def has_more(self, epochs: int | None) -> bool:
        """True if ``draw`` would return a sample."""
        if epochs is None:
            return True
        heads = (self._heads.head(self._name, lane) for lane in range(len(self._lanes)))
        return self._epoch < epochs and any(meta.ref.epoch < epochs for meta in heads)


def pieces_of(meta: Meta, pack: int | None, long: str) -> list[Meta]:
    """Return what a sample is packed as: itself; or, if it is longer than a row, all whole rows of
    it as one, and the rest."""
    if pack is None:
        return [meta]
    if meta.tokens <= pack:
        return [meta] if meta.tokens else []
    if long == "error":
        raise DataError(
            f"{describe(meta)} has {meta.tokens} tokens, a row has {pack}: pass long='split' or "
            "long='truncate' to Plan"
        )
    if long == "truncate":
        return [meta._replace(tokens=pack)]
    whole, rest = divmod(meta.tokens, pack)
    pieces = [meta._replace(tokens=whole * pack)]
    return [*pieces, Meta(_piece(meta.ref, whole), rest)] if rest else pieces


def _piece(ref: Ref, number: int) -> Ref:
    return ref._replace(piece=ref.piece + number)


def _joined(metas: Iterable[Meta], pack: int | None) -> Iterator[Meta]:
    """Yield samples in their order; whole rows of a document that follow one another are one."""
    before: Meta | None = None
    for meta in metas:
        if before is not None and pack is not None:
            whole, rest = divmod(before.tokens, pack)
            if not rest and not meta.tokens % pack and meta.ref == _piece(before.ref, whole):
                before = before._replace(tokens=before.tokens + meta.tokens)
                continue
        if before is not None:
            yield before
        before = meta
    if before is not None:
        yield before


def describe(meta: Meta) -> str:
    """Return the source, part and record of a sample, for messages."""
    ref = meta.ref
    return f"source {ref.source}: part {ref.part}, record {ref.record}"


def _costs(cost: Callable[[Meta], Any], metas: Sequence[Meta]) -> list[float]:
    """Return the cost of each. Raises DataError."""
    found = [cost(meta) for meta in metas]
    try:
        prices = [float(each) for each in found]
    except (TypeError, ValueError):
        prices = [math.nan]
    if prices and not (min(prices) >= 0 and math.isfinite(math.fsum(prices))):
        for meta, each in zip(metas, found):  # noqa: B905 - Python 3.9
            _checked(meta, each)
    return prices


def _checked(meta: Meta, found: Any) -> None:
    """Raise DataError for a cost that is none."""
    try:
        price = float(found)
    except (TypeError, ValueError):
        price = math.nan
    if not math.isfinite(price) or price < 0:
        raise DataError(f"cost() of {describe(meta)} is {found!r}; return a number >= 0")
