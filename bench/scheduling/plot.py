"""A bar plot as SVG, written as text: groups of bars on a logarithmic axis. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 64, 44
COLOURS = ("#7f7f7f", "#1b7837", "#5aae61", "#e08214", "#b2182b")  # also without colour vision


class Bar(NamedTuple):
    """``high``: where the whisker ends."""

    value: float
    high: float


def decades(values: Sequence[float]) -> tuple[int, int]:
    """The powers of ten that enclose all values; at least one decade. Raises ValueError."""
    if not values or min(values) <= 0.0:
        raise ValueError("a logarithmic axis needs values above 0")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def bars(title: str, axis: str, groups: Mapping[str, Mapping[str, Bar]], foot: str) -> str:
    """The SVG. ``groups``: title of the group → name of the bar → its value; all the same names."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    low, high = decades([v for group in groups.values() for bar in group.values() for v in bar])
    floor, room = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP

    def y(value: float) -> float:
        return floor - room * (math.log10(value) - low) / (high - low)

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 18, title, "start", 14),
        _text(WIDTH / 2, HEIGHT - 6, foot, "middle", 10),
        f'<text x="14" y="{TOP + room / 2:.0f}" text-anchor="middle" '
        f'transform="rotate(-90 14 {TOP + room / 2:.0f})">{escape(axis)}</text>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        out.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        out.append(_text(LEFT - 6, at + 4, f"{10.0**power:g}", "end"))
    for number, name in enumerate(names):
        x = LEFT + number * (WIDTH - LEFT - RIGHT) / len(names)
        out.append(f'<rect x="{x:.0f}" y="32" width="10" height="10" fill="{_colour(number)}"/>')
        out.append(_text(x + 14, 41, name, "start"))
    wide = (WIDTH - LEFT - RIGHT) / len(groups)
    thick = wide * 0.84 / len(names)
    for place, (group, members) in enumerate(groups.items()):
        begin = LEFT + place * wide + wide * 0.08
        out.append(_text(LEFT + (place + 0.5) * wide, floor + 16, group, "middle"))
        for number, name in enumerate(names):
            if name not in members:
                continue
            bar, x = members[name], begin + number * thick
            top, end, middle = y(bar.value), y(bar.high), x + thick * 0.45
            out.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{thick * 0.9:.1f}" '
                f'height="{floor - top:.1f}" fill="{_colour(number)}"/>'
            )
            out.append(f'<path d="M{middle:.1f} {top:.1f}V{end:.1f}" stroke="black"/>')
            out.append(_text(middle, min(top, end) - 3, f"{bar.value:.3g}", "middle", 9))
    out.append(f'<path d="M{LEFT} {floor}H{WIDTH - RIGHT}" stroke="black"/>')
    return "\n".join([*out, "</svg>", ""])


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
