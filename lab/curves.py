"""Loss curves of two runs beside each other, as text (pure)."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

_BARS = "▁▂▃▄▅▆▇█"


class Point(NamedTuple):
    """One step of a training: its loss, the epoch that did it, the wall-clock time after it."""

    loss: float
    epoch: int
    time: float


def parse(text: str) -> dict[int, Point]:
    """The points by step of a `loss.jsonl`; a torn last line is left out, ValueError for others."""
    points: dict[int, Point] = {}
    for line in text.splitlines(keepends=True):
        if not line.endswith("\n"):
            break  # still being written
        row = json.loads(line)
        points[int(row["step"])] = Point(float(row["loss"]), int(row["epoch"]), float(row["time"]))
    return points


def difference(one: Mapping[int, Point], other: Mapping[int, Point]) -> float:
    """The largest difference of a loss; infinite if the two do not have the same steps."""
    if one.keys() != other.keys() or not one:
        return float("inf")
    return max(abs(one[step].loss - other[step].loss) for step in one)


def choose(steps: Collection[int], around: Collection[int], count: int = 8) -> list[int]:
    """Some steps for a table: the first, the last, those `around` an event, some between."""
    ordered = sorted(steps)
    if not ordered:
        return []
    spread = {ordered[round(i * (len(ordered) - 1) / (count - 1))] for i in range(count)}
    return sorted(spread | (set(around) & set(ordered)))


def columns(steps: Sequence[int], width: int) -> list[int]:
    """The steps that a chart `width` columns wide shows, in equal distances."""
    if len(steps) <= width:
        return list(steps)
    return [steps[round(i * (len(steps) - 1) / (width - 1))] for i in range(width)]


def chart(losses: Sequence[float], low: float, high: float) -> str:
    """One bar per loss, from `low` (the smallest bar) to `high`."""
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[min(7, max(0, round((loss - low) * scale)))] for loss in losses)
