"""The planner: which samples the next step has, in which rows, for which share (pure).

It sees metadata alone. Steps are a function of the arguments, the state and the lanes' samples:
every process that runs it comes to the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

from robust_slurm.data.errors import DataError
from robust_slurm.data.lanes.position import Position
from robust_slurm.data.sample import Meta

from . import mix as mixture
from .balance import into_groups, into_rows
from .state import PlanState, SourceState

MOST_EMPTY = 100_000  # samples without a token, one after the other
Rows = tuple[tuple[Meta, ...], ...]
"""The samples, or pieces of them, of each row of a share, in their order."""


class Heads(Protocol):
    """The next sample of every lane."""

    def head(self, source: str, lane: int) -> tuple[Meta, Position]:
        """Return it, and the position after it; the same one until ``advance``."""

    def advance(self, source: str, lane: int) -> None:
        """Go to the lane's next sample."""


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


def next_step(
    rules: Rules, state: PlanState, heads: Heads, held_back: Collection[str] = ()
) -> PlannedStep | None:
    """Return the next step; None if there is none: the epochs are over, and what is left does not
    suffice for all shares. ``held_back``: sources that nothing is drawn from now; None also if
    the others do not suffice for whole rows. Raises DataError."""
    drawing = _Drawing(rules, state, heads, held_back)
    carried = list(state.carried)
    ready = carried + drawing.until_full(sum(meta.tokens for meta in carried), len(carried))
    least = rules.shares if rules.pack else rules.shares * rules.batch
    if len(ready) < least or (held_back and not drawing.full):
        return None
    costs = _costs(rules.cost, ready)
    if rules.pack:
        packed = into_rows(
            [meta.tokens for meta in ready], costs, len(carried),
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
        PlanState(state.step + 1, drawing.sources(), tuple(ready[item] for item in left)),
    )


class _Drawing:
    """Draws samples for one step."""

    def __init__(
        self, rules: Rules, state: PlanState, heads: Heads, held_back: Collection[str]
    ) -> None:
        self._rules = rules
        self._heads = heads
        self._places = {name: _Place(name, each, heads) for name, each in state.sources.items()}
        self._credits = {name: each.credit for name, each in state.sources.items()}
        where = f"mix({state.step})"
        parts = mixture.parts_of(rules.mix(state.step), list(state.sources), where)
        self._parts = {name: part for name, part in parts.items() if name not in held_back}
        self.drawn: list[Meta] = []
        self.full = False
        """The step has as many samples as it should."""

    def sources(self) -> dict[str, SourceState]:
        """Return the sources' states after what was drawn."""
        return {name: place.state(self._credits[name]) for name, place in self._places.items()}

    def until_full(self, tokens: int, samples: int) -> list[Meta]:
        """Draw until the step's rows are full, or all sources have come to their end."""
        rules = self._rules
        rows = rules.shares * rules.batch
        wanted = rows * rules.pack * rules.fill if rules.pack else rows
        have = tokens if rules.pack else samples
        found: list[Meta] = []
        empty = 0
        while have < wanted and self._parts:
            name = mixture.choose(self._parts, self._credits)
            meta = self._places[name].draw(rules.epochs)
            if meta is None:
                del self._parts[name]
                continue
            self.drawn.append(meta)
            pieces = pieces_of(meta, rules.pack, rules.long)
            if len(pieces) == 1:
                amount = pieces[0].tokens if rules.pack else 1
            else:
                amount = sum(piece.tokens for piece in pieces)
            empty = 0 if amount else empty + 1
            if empty > MOST_EMPTY:
                raise DataError(f"source {name}: {MOST_EMPTY} samples in a row have no token")
            mixture.book(self._parts, self._credits, name, amount)
            found += pieces
            have += amount
        self.full = have >= wanted
        return found


class _Place:
    """The place in one source, of which samples are drawn."""

    def __init__(self, name: str, state: SourceState, heads: Heads) -> None:
        self._name = name
        self._heads = heads
        self._lanes = list(state.lanes)
        self._epoch, self._turn, self._drawn = state.epoch, state.turn, state.drawn

    def state(self, credit: int) -> SourceState:
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
                meta, after = self._heads.head(self._name, lane)
                this, lane = lane, lane + 1
                if lane == len(self._lanes):
                    lane = 0
                if meta.ref.epoch <= self._epoch:
                    self._heads.advance(self._name, this)
                    self._lanes[this] = after
                    self._turn = lane
                    self._drawn += 1
                    return meta
                earliest = min(earliest, meta.ref.epoch)
            self._epoch = int(earliest)  # lanes may have no sample in many passes
        return None


def pieces_of(meta: Meta, pack: int | None, long: str) -> list[Meta]:
    """Return what a sample is packed as: itself, or its pieces if it is longer than a row."""
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
    return [
        Meta(meta.ref._replace(piece=number), min(pack, meta.tokens - start))
        for number, start in enumerate(range(0, meta.tokens, pack))
    ]


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
