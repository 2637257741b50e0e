"""The number of readers that there are to be, and the lanes of each (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from robust_slurm.data.lanes.tally import Figures

    Lane = tuple[str, int]

MOST = 64  # readers of a data process
FIRST = 2  # with fewer, nothing is read sooner than by the data process's own threads
ENOUGH = 1.0  # s that ranks must have waited before more readers are considered
FULL = 0.5  # part of its time for which a reader has work, above which there are too few
IDLE = 30.0  # s without a wait, to judge that there are too many
_CALM = 0.01  # part of the time that ranks may wait without wanting more
_UNEVEN = 1.25  # a reader's work over the mean, above which lanes move


class Spell(NamedTuple):
    """Some time of the training, in seconds."""

    lasted: float
    waited: float  # ranks waited for a step
    worked: float  # all threads that read had, or wanted, a processor


def readers_wanted(now: int, spell: Spell, cores: int) -> int | None:
    """Return how many readers there are to be after this spell; None: it is too short to judge.

    More, if ranks wait and all readers are busy: processors are lacking then, not files. Never more
    than ``cores``: ranks have priority on them, but do not use them while they wait for data.
    Fewer, if a smaller number would be half idle. 0: the data process reads by itself.
    """
    most = min(MOST, cores) if cores >= FIRST else 0
    if now > most:
        return most
    if spell.waited >= ENOUGH:
        busy = spell.worked >= FULL * max(now, 1) * spell.waited
        return min(most, max(FIRST, now + max(1, now // 2))) if busy else now
    if spell.lasted < IDLE:
        return None
    fewer = now - 1 if now > FIRST else 0
    calm = spell.waited <= _CALM * spell.lasted
    idle = spell.worked < FULL * max(fewer, FULL) * spell.lasted
    return fewer if calm and idle else now


def lane_loads(
    lanes: Mapping[str, int],
    figures: Mapping[str, Figures],
    parts: Mapping[str, float],
    by_tokens: bool,
) -> dict[Lane, float]:
    """Return each lane's part of the work to come, by what its source's tokens (or samples) have
    cost so far and by the mixture to come; while that is not known, all have the same part. A
    source that has not been read is like the mean."""
    costs = {}
    for name, each in figures.items():
        amount = each.tokens if by_tokens else each.records
        if amount and each.busy:
            costs[name] = each.busy / amount
    mean = sum(costs.values()) / len(costs) if costs else 1.0
    return {
        (name, lane): (parts.get(name, 0) if parts else 1) * costs.get(name, mean) / count
        for name, count in lanes.items()
        for lane in range(count)
    }


def dealt(loads: Mapping[Lane, float], count: int, before: Mapping[Lane, int]) -> dict[Lane, int]:
    """Return which of ``count`` readers has each lane. Lanes stay where they were as far as
    possible: one that moves opens its file anew."""
    places = {lane: place for lane, place in before.items() if lane in loads and place < count}
    sums = [0.0] * count
    lanes = [0] * count
    for lane, place in places.items():
        sums[place] += loads[lane]
        lanes[place] += 1
    for lane in sorted(loads.keys() - places.keys(), key=lambda lane: (-loads[lane], lane)):
        place = min(range(count), key=lambda each: (sums[each], lanes[each]))
        places[lane] = place
        sums[place] += loads[lane]
        lanes[place] += 1
    even = _UNEVEN * sum(sums) / count
    while True:
        fullest, emptiest = (pick(range(count), key=sums.__getitem__) for pick in (max, min))
        gap = sums[fullest] - sums[emptiest]
        movable = [lane for lane, at in places.items() if at == fullest and 0 < loads[lane] < gap]
        if sums[fullest] <= even or not movable:
            return places
        moved = min(movable, key=lambda lane: (abs(loads[lane] - gap / 2), lane))
        places[moved] = emptiest
        sums[fullest] -= loads[moved]
        sums[emptiest] += loads[moved]
