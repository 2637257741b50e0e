"""The answer of ``robust-standby size``, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from standby.size.count import (
    UNSURE,
    LossSource,
    PoolCount,
    SizeError,
    judge,
    losses,
    pool,
    probability,
    units,
)
from standby.size.observed import Observed

RARE = 0.05  # events per 1,000 node-days; a lower rate is more likely in the wrong unit
ESTIMATE, UPPER, GIVEN = "estimate", "upper end of the interval", "as given"


class Cause(NamedTuple):
    """A source of losses as people read it.

    ``per_1000``: events per 1,000 node-days; ``units``: how many groups of that size there are;
    ``p``: probability that one of them is lost within the refill time; ``days``: mean time between
    two events.
    """

    size: int
    per_1000: float
    units: int
    p: float
    days: float | None


class SizeCase(NamedTuple):
    """One set of rates: the pool by single nodes alone, and by all causes.

    Both are judged by the losses of all causes.
    """

    name: str
    causes: tuple[Cause, ...]
    mean: float  # nodes lost within the refill time
    single: PoolCount
    all: PoolCount


class PoolSize(NamedTuple):
    """The whole answer."""

    nodes: int
    refill_hours: float
    quantile: float
    cases: tuple[SizeCase, ...]
    measured: Observed | None
    notes: tuple[str, ...]


def case(
    name: str, nodes: int, sources: Sequence[LossSource], hours: float, quantile: float
) -> SizeCase:
    """Return one case. Raises SizeError."""
    days = hours / 24.0
    lost = losses(nodes, sources, days)
    alone = losses(nodes, [source for source in sources if source.size == 1], days)
    single = pool(alone, quantile).standbys
    return SizeCase(
        name,
        tuple(_cause(nodes, source, days) for source in sources),
        lost.mean,
        judge(lost, single),
        pool(lost, quantile),
    )


def _cause(nodes: int, source: LossSource, days: float) -> Cause:
    parts = units(nodes, source.size)
    return Cause(
        source.size,
        1000.0 * source.rate,
        sum(count for count, _ in parts),
        max(probability(source, days, size) for _, size in parts),
        1.0 / (source.rate * nodes) if source.rate * nodes > 0.0 else None,
    )


def from_rates(
    nodes: int, sources: Sequence[LossSource], hours: float, quantile: float
) -> PoolSize:
    """Return the size of the pool by given rates. Raises SizeError."""
    found = case(GIVEN, nodes, sources, hours, quantile)
    return PoolSize(nodes, hours, quantile, (found,), None, tuple(_notes([found])))


def from_ledger(
    nodes: int, seen: Observed, named: Sequence[LossSource], hours: float, quantile: float
) -> PoolSize:
    """Return the size of the pool by the estimated rates, and by high ones.

    The high rates are the upper ends of the 95 % intervals.
    ``named``: groups given on the command line; they replace the observed ones.
    Raises SizeError.
    """
    cases = []
    notes = []
    for name, upper in ((ESTIMATE, False), (UPPER, True)):
        single = seen.single.high if upper else seen.single.estimate
        groups = list(named) or seen.groups(upper)
        try:
            cases.append(case(name, nodes, [LossSource(1, single), *groups], hours, quantile))
        except SizeError as error:
            if not upper:
                raise
            notes.append(f"no pool size for the {UPPER}: too few node-days were observed: {error}")
    if named and seen.several.events:
        notes.append(
            f"{seen.several.events} events that took several nodes were seen; "
            "the groups named on the command line are used instead"
        )
    return PoolSize(nodes, hours, quantile, tuple(cases), seen, (*notes, *_notes(cases)))


def _notes(cases: Sequence[SizeCase]) -> list[str]:
    """Return the doubts that a reader should have."""
    notes = []
    if all(cause.size == 1 for cause in cases[0].causes):
        notes.append(
            "nodes that are lost together (an evicted group, a switch) are not counted; add them "
            "with --group-rate and --switch-rate"
        )
    for cause in cases[0].causes:
        who = "a node" if cause.size == 1 else f"a group of {cause.size}"
        if cause.p > UNSURE:
            notes.append(
                f"{who} is lost with p = {cause.p:.2g} within the refill time, but counted once: "
                "the pool may be slightly too small"
            )
        if cause.size == 1 and 0.0 < cause.per_1000 < RARE:
            years = 1000.0 / cause.per_1000 / 365.0
            notes.append(
                f"at this rate {who} fails once in {years:,.0f} years; rates are events per 1,000 "
                "node-days"
            )
    return notes
