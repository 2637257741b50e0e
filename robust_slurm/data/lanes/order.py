"""Pure: the shuffled order of parts and records, the same on every machine and Python version.

All shuffles are Fisher-Yates, with random numbers from SHAKE-256 of the seed and a name for what
is shuffled. The ``random`` module promises the same numbers of a seed for ``random()`` alone.
"""

from __future__ import annotations

import hashlib
import json
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def permutation(size: int, *key: int | str) -> list[int]:
    """Return the numbers below ``size``, shuffled by ``key``."""
    digest = hashlib.shake_256(json.dumps(key).encode()).digest(8 * size)
    draws = struct.unpack(f"<{size}Q", digest)
    order = list(range(size))
    for last in range(size - 1, 0, -1):
        other = draws[last] * (last + 1) >> 64
        order[last], order[other] = order[other], order[last]
    return order


def lanes_of(wanted: int, parts: int) -> int:
    """Return how many lanes a source has: never more than parts, so that none is empty."""
    return max(1, min(wanted, parts))


def parts_of_lane(
    sizes: Sequence[int], seed: int, source: str, epoch: int, lane: int, lanes: int
) -> list[int]:
    """Return the parts that a lane reads in pass ``epoch``, in the order of reading.

    The shuffled parts are dealt one by one to the lane with the fewest bytes so far: lanes of
    files of unlike sizes come to the end of a pass at about the same time.
    """
    load = [0] * lanes
    mine = []
    for part in permutation(len(sizes), seed, "parts", source, epoch):
        taker = min(range(lanes), key=load.__getitem__)
        load[taker] += sizes[part] + 1  # an empty file counts as well
        if taker == lane:
            mine.append(part)
    return mine


def window_order(
    size: int, seed: int, source: str, epoch: int, part: int, number: int
) -> list[int]:
    """Return the order of a window's records, by their index in the window.

    The order is always that of ``size`` records, also if the part's last window has fewer or some
    are left out: missing records do not change the order of the others.
    """
    if size == 1:
        return [0]
    return permutation(size, seed, "records", source, epoch, part, number)
