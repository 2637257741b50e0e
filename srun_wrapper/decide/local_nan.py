"""The machine whose ranks alone had a loss that is not finite, at the first such step (pure).

Gradients are summed over the ranks after each rank has computed its own loss. So a NaN that comes
up on one rank is on that rank alone for one step, and on all of them from the next step on. The
losses that the ranks report are compared: if they report a loss that was averaged over the ranks,
all have the NaN at once, and no rank is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHOWN = 8  # ranks


@dataclass(frozen=True, slots=True)
class Losses:
    """Known losses of one rank."""

    rank: str
    """The rank's name for people: "rank 5"."""
    node: str
    bad: int | None
    """First step whose loss was not finite; None: there is none, or it has no number."""
    finite: int | None
    """A step whose loss is known to be finite, as were all before it; None: no step is known."""


@dataclass(frozen=True, slots=True)
class LocalNan:
    """The ranks, all of one node, whose losses alone were not finite at a step."""

    node: str
    ranks: tuple[str, ...]
    held: tuple[str, ...]
    """All ranks of the node."""
    step: int
    finite: int
    """Number of the other ranks."""

    def line(self) -> str:
        """Return the line of evidence."""
        numbers = [rank.removeprefix("rank ") for rank in self.ranks[:SHOWN]]
        more = f" and {len(self.ranks) - SHOWN} more" if len(self.ranks) > SHOWN else ""
        one = "rank" if len(self.ranks) == 1 else "ranks"
        others = (
            "1 other rank's loss was"
            if self.finite == 1
            else (f"losses of the other {self.finite} ranks were")
        )
        return (
            f"only {one} {', '.join(numbers)}{more} on {self.node} had a loss that is not finite "
            f"at step {self.step}; the {others} finite at that step"
        )


def locate(losses: Sequence[Losses]) -> LocalNan | None:
    """Find the node; None unless every other rank is known to have had a finite loss at that step.

    A rank that reports no loss (in a pipeline, any stage but the last) may be the one that
    computed wrongly: then no node is named.
    """
    steps = [each.bad for each in losses if each.bad is not None]
    if not steps:
        return None
    first = min(steps)
    own = [each for each in losses if each.bad == first]
    others = [each for each in losses if each.bad != first]
    finite = all(each.finite is not None and each.finite >= first for each in others)
    nodes = {each.node for each in own}
    elsewhere = any(each.node not in nodes for each in others)
    if len(nodes) > 1 or not elsewhere or not finite:
        return None
    node = own[0].node
    held = tuple(each.rank for each in losses if each.node == node)
    return LocalNan(node, tuple(each.rank for each in own), held, first, len(others))
