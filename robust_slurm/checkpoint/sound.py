"""Which states may be used after a loss that was not finite. Pure.

A NaN may be in the state for a while before the loss shows it (a gradient, the optimizer's
moments). A state is known to be sound when a finite loss was computed from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .plan import Place, Sets


class Bound(NamedTuple):
    """The last state that a finite loss proved; what was saved after it may hold a NaN."""

    step: int
    """Of that state; below 1: none was proven."""
    epoch: int
    """In which the loss stopped being finite: later ones began anew, from before."""


def sound(
    sets: Sets, durable: Sequence[tuple[int, int]], world: int, before: Bound
) -> tuple[Sets, list[tuple[int, int]], str]:
    """The copies and the durable steps (step, world) to choose from, and what to tell people.

    Those that are known to be sound. Where none is, the oldest one that there is: it may be sound
    all the same, and a long training is not begun anew for a doubt. Nothing at all only where
    memory has nothing proven and the disk has nothing.
    """
    good = {key: copies for key, copies in sets.items() if _is_sound(*key, before)}
    disk = [entry for entry in durable if entry[0] <= before.step]
    doubtful = {key[0] for key in sets if key not in good} | {step for step, _ in durable}
    doubtful -= {step for step, _ in disk}
    if not doubtful:
        return good, disk, ""
    steps = f"{min(doubtful)}-{max(doubtful)}" if len(doubtful) > 1 else f"{min(doubtful)}"
    head = f"left out: step {steps}, as no finite loss was computed from it"
    if disk or any(len(copies) == world for copies in good.values()):
        return good, disk, head
    whole = {key: c for key, c in sets.items() if len(c) == world and before.step > 0}
    oldest = min([*(step for step, _ in whole), *(step for step, _ in durable)], default=None)
    if oldest is None:
        return {}, [], f"{head}; there is no older one"
    return (
        {key: copies for key, copies in whole.items() if key[0] == oldest},
        [entry for entry in durable if entry[0] == oldest],
        f"no step is left that a finite loss was computed from: step {oldest} may hold a NaN",
    )


def only_sound(places: Sequence[Place], before: Bound | None) -> list[Place]:
    """The places with those copies alone that are known to be sound."""
    if before is None:
        return list(places)
    return [
        place._replace(holdings=[h for h in place.holdings if _is_sound(h.step, h.epoch, before)])
        for place in places
    ]


def _is_sound(step: int, epoch: int, before: Bound) -> bool:
    return step <= before.step or epoch > before.epoch
