"""The answer of ``robust-standby size``, as data. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from robust_slurm.text import counted
from standby.size.count import UNSURE, LossSource, losses, pool, probability, units
from standby.size.observed import Observed

RARE = 0.05  # events per 1,000 node-days; a lower rate is more likely in the wrong unit


class Cause(NamedTuple):
    """A source of losses as people read it.

    ``per_1000``: events per 1,000 node-days; ``units``: how many groups of that size there are;
    ``p``: probability that one of them is lost within the refill time; ``days``: mean time between
    two events; ``standbys``: the pool for this source alone.
    """

    size: int
    per_1000: float
    units: int
    p: float
    days: float | None
    standbys: int


class PoolSize(NamedTuple):
    """The whole answer. ``standbys``: the pool for all causes."""

    nodes: int
    refill_hours: float
    quantile: float
    causes: tuple[Cause, ...]
    standbys: int
    measured: Observed | None
    notes: tuple[str, ...]


def size_of(
    nodes: int,
    sources: Sequence[LossSource],
    hours: float,
    quantile: float,
    measured: Observed | None = None,
) -> PoolSize:
    """Return the size of the pool. ``measured``: where the rates are from. Raises SizeError."""
    days = hours / 24.0
    causes = tuple(_cause(nodes, source, days, quantile) for source in sources)
    standbys = pool(losses(nodes, sources, days), quantile)
    notes = tuple(_notes(causes, measured))
    return PoolSize(nodes, hours, quantile, causes, standbys, measured, notes)


def _cause(nodes: int, source: LossSource, days: float, quantile: float) -> Cause:
    parts = units(nodes, source.size)
    return Cause(
        source.size,
        1000.0 * source.rate,
        sum(count for count, _ in parts),
        max(probability(source, days, size) for _, size in parts),
        1.0 / (source.rate * nodes) if source.rate * nodes > 0.0 else None,
        pool(losses(nodes, [source], days), quantile),
    )


def _notes(causes: Sequence[Cause], measured: Observed | None) -> list[str]:
    """Return the doubts that a reader should have."""
    notes = []
    if measured is not None and measured.events < FEW:
        text = f"{counted(measured.events, 'event')} in {measured.node_days:,.0f} node-days: "
        # "The rule of three": with a higher rate nothing would be seen in fewer than 5 % of cases.
        most = f"up to {3000 / measured.node_days:.3g} per 1,000 node-days; see --rate"
        text += "the rate may be " + ("several times as high" if measured.events else most)
        notes.append(text)
    if all(cause.size == 1 for cause in causes):
        notes.append(
            "nodes that are lost together (an evicted group, a switch) are not counted; add them "
            "with --group-rate and --switch-rate"
        )
    for cause in causes:
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


FEW = 10
"""Events below which a measured rate is uncertain by a factor of two and more (Poisson, 95 %)."""
