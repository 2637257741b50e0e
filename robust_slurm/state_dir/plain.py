"""Values of users' records as plain values: of the right type, finite, printable, or nothing."""

from __future__ import annotations

import json
import math
from typing import Any

from robust_slurm.text import one_line

MAX_TEXT = 300  # characters of one value
ANY_CLOCK = 1e11  # the year 5138, which no clock reaches


def clean(value: object, limit: int = MAX_TEXT) -> str:
    """The text as one printable line; "" for what is no text."""
    return one_line(value, limit) if isinstance(value, str) else ""


def number(value: object) -> float | None:
    """A finite number that is none of JSON's surprises, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return None
    return float(value) if math.isfinite(value) and abs(value) < 1e15 else None


def moment(value: object, end: float = 4e9) -> float | None:
    """A time between 1970 and 2096, in seconds since 1970, or None: calendars end somewhere.

    ``end``: another end than 2096, for what a clock that is wrong may have dated.
    """
    when = number(value)
    return when if when is not None and 0 <= when < end else None


def whole(value: object) -> int | None:
    """An integer of at most 63 bits, or None."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 1 << 63:
        return None
    return value


def words(value: object, limit: int) -> tuple[str, ...]:
    """The printable texts of a list, or of a single value; at most 50."""
    items = value if isinstance(value, list) else [value]
    return tuple(text for item in items[:50] if (text := clean(item, limit)))


def decode(raw: bytes) -> Any:
    """JSON, or None for anything else (also for numbers or nesting made to hurt)."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        return None
