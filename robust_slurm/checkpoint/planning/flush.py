"""Choose the stores that write the snapshots to the durable directory before the job ends. Pure.

A requeue or the end of the job takes the nodes' memory. Before it, the newest complete step is
written: each rank's snapshot once, by a store that has it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .plan import Copies, Holder, newest_complete, usable


class Write(NamedTuple):
    """One snapshot that a store writes."""

    store: str
    owner: int
    file: str
    """Name in the store's directory."""


class FlushPlan(NamedTuple):
    """The writes of a flush, and the stores that make them."""

    step: int
    """0: no step is complete."""
    writes: tuple[Write, ...]
    """Exactly one for each rank, or none where there is nothing to do."""
    committer: str
    """Store that commits when all have been written; empty if there are no writes."""
    lines: tuple[str, ...]


def flush(
    places: Sequence[Holder], world: int, durable: Iterable[tuple[int, int]] = ()
) -> FlushPlan:
    """Share the newest complete step in memory out among the stores that have it.

    ``durable``: (step, world) of the committed steps. Odd holdings are passed over.
    """
    sets, _ = usable(places, world)
    newest, lines = newest_complete(sets, world)
    if newest is None:
        return FlushPlan(0, (), "", (*lines, "nothing to write: no step is complete in memory"))
    step = newest[0]
    if any(done >= step for done, _ in durable):
        return FlushPlan(step, (), "", (*lines, f"nothing to write: step {step} is durable"))
    writes = _share_out(sets[newest])
    nodes = {place.store: place.node for place in places}
    count = len({nodes[write.store] for write in writes})
    head = f"write step {step}: {world} snapshots from {count} node{'s' * (count != 1)}"
    return FlushPlan(step, writes, writes[0].store if writes else "", (head, *lines))


def _share_out(copies: Copies) -> tuple[Write, ...]:
    """One copy of each: a rank's own before a replica, then from the least loaded node."""
    load: Counter[tuple[str, str]] = Counter()  # bytes, by (kind, name)
    writes = []
    own = {o: [c for c in found if c.holding.tier == "memory"] for o, found in copies.items()}
    # First those whose own copy is there; of the others those with the least choice.
    for owner in sorted(copies, key=lambda o: (not own[o], len(own[o] or copies[o]), o)):
        place, held = min(
            own[owner] or copies[owner],
            key=lambda c: (
                load["node", c.place.node],
                load["store", c.place.store],
                c.place.store,
                c.holding.file,
            ),
        )
        load["node", place.node] += held.size
        load["store", place.store] += held.size
        writes.append(Write(place.store, owner, held.file))
    return tuple(sorted(writes, key=lambda write: write.owner))
