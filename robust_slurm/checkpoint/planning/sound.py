"""Choose usable states when a silent fault may have spoiled the newest ones. Pure.

A NaN may be in the state for a while before the loss shows it (a gradient, the optimizer's
moments). A state is known to be sound when a finite loss was computed from it. It is *certified*
when, besides, the ranks that hold the same state were seen to hold the same bits.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from .held import Holder, Sets


class Bound(NamedTuple):
    """The last state that a finite loss proved; what was saved after it may hold a NaN."""

    step: int
    """Step of that state; below 1: none was proven."""
    epoch: int
    """Epoch in which the loss stopped being finite; later ones began from an earlier state."""


class Trust(NamedTuple):
    """Existing states that are certified, and those that are in doubt."""

    memory: Collection[tuple[int, int]] = ()
    """(step, epoch) of certified ones."""
    disk: Collection[int] = ()
    """Certified steps in the durable directory."""
    doubted: Collection[int] = ()
    """Steps there that an earlier recovery passed over."""
    why: str = ""
    """Set: the newest states may be spoiled, and a certified one is preferred."""


NO_TRUST = Trust()


def trusted(
    sets: Sets, durable: Sequence[tuple[int, int]], world: int, trust: Trust, before: Bound | None
) -> tuple[Sets, list[tuple[int, int]], str]:
    """Return the copies and the durable steps (step, world) to choose from, and a line for people.

    Where a certified state is preferred and there is none, those that are ``sound`` serve.
    """
    whole = {key: copies for key, copies in sets.items() if len(copies) == world}
    disk = [entry for entry in durable if entry[0] not in trust.doubted]
    if not disk and not whole:
        disk = list(durable)  # better than to begin anew
    if not trust.why:
        return (sets, disk, "") if before is None else sound(sets, disk, world, before)
    good = {key: copies for key, copies in whole.items() if key in trust.memory}
    sure = [entry for entry in disk if entry[0] in trust.disk]
    if good or sure:
        newest = max([step for step, _ in good] + [step for step, _ in sure])
        left = {step for step, _ in (*whole, *disk) if step > newest}
        return good, sure, f"left out: {_steps(left)}, not certified: {trust.why}" if left else ""
    if before is not None:
        return sound(sets, disk, world, before)
    there = bool(whole or disk)
    return sets, disk, f"no step is certified: the newest is used; {trust.why}" if there else ""


def sound(
    sets: Sets, durable: Sequence[tuple[int, int]], world: int, before: Bound
) -> tuple[Sets, list[tuple[int, int]], str]:
    """The copies and the durable steps (step, world) to choose from, and what to tell people.

    These are the states known to be sound. If there is none, it is the oldest state: it may be
    sound all the same, and a long training is not begun anew for a doubt. The result is empty only
    if memory has nothing proven and the disk has nothing.
    """
    good = {key: copies for key, copies in sets.items() if _is_sound(*key, before)}
    disk = [entry for entry in durable if entry[0] <= before.step]
    doubtful = {key[0] for key in sets if key not in good} | {step for step, _ in durable}
    doubtful -= {step for step, _ in disk}
    if not doubtful:
        return good, disk, ""
    head = f"left out: {_steps(doubtful)}, as no finite loss was computed from it"
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


def only_sound(places: Sequence[Holder], before: Bound | None) -> list[Holder]:
    """Return the places with only those copies that are known to be sound."""
    if before is None:
        return list(places)
    return [
        place._replace(holdings=[h for h in place.holdings if _is_sound(h.step, h.epoch, before)])
        for place in places
    ]


def _steps(steps: Collection[int]) -> str:
    first, last = min(steps), max(steps)
    return f"step {first}-{last}" if last > first else f"step {first}"


def _is_sound(step: int, epoch: int, before: Bound) -> bool:
    return step <= before.step or epoch > before.epoch
