"""Charts as plain numbers and texts, for the template to draw as SVG. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 1000.0, 62.0, 40.0  # units of the picture
POINTS = 500  # of a curve; more are averaged
_TIME_STEPS = (60, 300, 900, 1800, 3600, 7200, 21600, 43200, 86400, 172800, 604800, 1209600)


class Tick(NamedTuple):
    at: float
    text: str


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str


class Marker(NamedTuple):
    x: float
    text: str
    title: str


@dataclass(frozen=True)
class Curve2D:
    """A line in the picture: its CSS class, its label, and "x,y x,y …" for each unbroken part."""

    kind: str
    label: str
    parts: tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """A chart with a time axis. All positions are in units of the picture."""

    title: str
    unit: str
    height: float
    top: float
    bottom: float
    curves: tuple[Curve2D, ...]
    xticks: tuple[Tick, ...]
    yticks: tuple[Tick, ...]
    marks: tuple[Marker, ...]


@dataclass(frozen=True)
class Axis:
    """The time axis: seconds since 1970 to units of the picture."""

    begin: float
    end: float

    def x(self, when: float) -> float:
        share = (when - self.begin) / max(self.end - self.begin, 1e-9)
        return round(LEFT + max(0.0, min(1.0, share)) * (WIDTH - LEFT - RIGHT), 2)

    def ticks(self, most: int = 7) -> tuple[Tick, ...]:
        """Ticks at round local times."""
        span = self.end - self.begin
        step = float(next((s for s in _TIME_STEPS if span / s <= most), 0))
        if span < 60 or not step:
            step = max(span / most, 1e-3)
            found = [self.begin + step * n for n in range(most + 1)]
        else:
            offset = time.localtime(self.begin).tm_gmtoff
            first = math.ceil((self.begin + offset) / step) * step - offset
            found = [first + step * n for n in range(int((self.end - first) // step) + 1)]
        form = "%H:%M:%S" if step < 60 else "%H:%M" if span <= 86400 else "%d %b %H:%M"
        return tuple(
            Tick(self.x(at), time.strftime(form, time.localtime(at)))
            for at in found
            if self.begin <= at <= self.end
        )


def plot(
    title: str,
    unit: str,
    axis: Axis,
    series: Sequence[tuple[str, str, Sequence[Sequence[tuple[float, float]]]]],
    marks: Sequence[Marker],
    height: float = 190.0,
    bounds: tuple[float, float] | None = None,
) -> Plot | None:
    """A chart of curves (CSS class, label, unbroken parts of (time, value)); None without values.

    The scale is logarithmic where values are positive and spread over more than a factor of 5.
    """
    values = [v for *_, parts in series for part in parts for _, v in part]
    if not values:
        return None
    low, high = bounds or _bounds(values)
    scale = _scale(low, high, logarithmic=bounds is None and low > 0 and high / low > 5)
    top, bottom = 14.0, height - 26.0

    def y(value: float) -> float:
        return round(bottom - max(0.0, min(1.0, scale(value))) * (bottom - top), 2)

    curves = tuple(
        Curve2D(
            kind,
            label,
            tuple(
                " ".join(f"{axis.x(at)},{y(value)}" for at, value in thinned(part))
                for part in parts
                if part
            ),
        )
        for kind, label, parts in series
    )
    ticks = tuple(Tick(y(v), f"{v:.6g}") for v in round_values(low, high))
    return Plot(title, unit, height, top, bottom, curves, axis.ticks(), ticks, tuple(marks))


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    """The range of the values, with room; of many, without the utmost hundredth."""
    ordered = sorted(values)
    cut = len(ordered) // 100
    low, high = ordered[cut], ordered[-1 - cut]
    if low > 0 and high / low > 5:
        return low * 0.95, high * 1.05
    room = max((high - low) * 0.12, abs(high) * 0.02, 1e-9)
    return (max(0.0, low - room) if low >= 0 else low - room), high + room


def _scale(low: float, high: float, logarithmic: bool) -> Callable[[float], float]:
    if logarithmic:
        base, span = math.log(low), math.log(high) - math.log(low)
        return lambda value: (math.log(max(value, low)) - base) / span
    return lambda value: (value - low) / max(high - low, 1e-12)


def round_values(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers within [low, high]: at most ``most`` + 1."""
    span = high - low
    if span <= 0:
        return [low]
    if low > 0 and high / low > 5:
        found = [m * 10.0**e for e in range(-12, 15) for m in (1, 2, 5)]
        return [v for v in found if low <= v <= high]
    rough = span / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step - 1e-9)
    return [round(n * step, 12) for n in range(first, math.floor(high / step + 1e-9) + 1)]


def thinned(part: Sequence[tuple[float, float]], most: int = POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points, each the mean of its neighbours."""
    if len(part) <= most:
        return list(part)
    size = len(part) / most
    found = []
    for n in range(most):
        some = part[int(n * size) : max(int((n + 1) * size), int(n * size) + 1)]
        found.append((sum(t for t, _ in some) / len(some), sum(v for _, v in some) / len(some)))
    return found
