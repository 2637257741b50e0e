"""The mixture: which source the next sample is drawn from (pure).

Largest deficit first. A source's credit is what it should have given by the weights so far, less
what it has given. All numbers are integers, so the choice is the same on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from robust_slurm.data.errors import DataError

WHOLE = 1 << 30
"""The sum of all parts: each weight is rounded to a whole number of them."""


def parts_of(weights: Any, sources: Sequence[str], where: str) -> dict[str, int]:
    """Return the weights of the sources as parts of ``WHOLE``, without those of weight 0.

    Raises DataError that begins with ``where``.
    """
    if not isinstance(weights, Mapping):
        raise DataError(f"{where}: {weights!r} is not a dict of source: weight")
    if unknown := [name for name in weights if name not in sources]:
        known = ", ".join(sources)
        raise DataError(f"{where}: {unknown[0]!r} is none of the sources ({known})")
    for name, weight in weights.items():
        right = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not right or not math.isfinite(weight) or weight < 0:
            raise DataError(f"{where}: the weight of {name!r} is {weight!r}; give a number >= 0")
    total = math.fsum(weights.values())
    if total <= 0:
        raise DataError(f"{where}: no source has a weight above 0")
    return {
        name: max(1, round(weights[name] / total * WHOLE))
        for name in sources
        if weights.get(name, 0) > 0
    }


def choose(parts: Mapping[str, int], credits: Mapping[str, int]) -> str:
    """Return the source that has given least for its weight; ties by weight, then in order."""
    chosen, most, widest = "", 0, 0
    for name, part in parts.items():
        credit = credits[name]
        if not chosen or credit > most or (credit == most and part > widest):
            chosen, most, widest = name, credit, part
    return chosen


def book(parts: Mapping[str, int], credits: dict[str, int], name: str, amount: int) -> str:
    """Book ``amount`` (tokens, or samples) that ``name`` has given. Return the source that is next,
    as ``choose``: both in one, as it is done for every sample."""
    credits[name] -= sum(parts.values()) * amount
    chosen, most, widest = "", 0, 0
    for each, part in parts.items():
        credit = credits[each] = credits[each] + part * amount
        if not chosen or credit > most or (credit == most and part > widest):
            chosen, most, widest = each, credit, part
    return chosen
