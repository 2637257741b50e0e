"""bench.scheduling: the plot."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from bench.scheduling.plot import Bar, bars, decades


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.5, 150.0], (-1, 3)), ([1.0, 1.0], (0, 1)), ([1.0, 10.0], (0, 1)), ([2.0], (0, 1))],
)
def test_decades(values: list[float], expected: tuple[int, int]) -> None:
    assert decades(values) == expected


@pytest.mark.parametrize("values", [[], [0.0, 1.0]])
def test_what_has_no_logarithm(values: list[float]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        decades(values)


def test_bars_are_as_high_as_their_logarithms() -> None:
    groups = {"<a>": {"x": Bar(1.0, 1.0), "y": Bar(10.0, 20.0)}, "b": {"x": Bar(100.0, 100.0)}}
    root = ElementTree.fromstring(bars("t & t", "s", groups, "foot"))
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert {"<a>", "b", "t & t", "10", "100", "foot"} <= set(texts)
    heights = [
        float(element.attrib["height"])
        for element in root.iter()
        if element.tag.endswith("rect") and float(element.attrib.get("y", 0)) > 40
    ]
    assert sorted(round(h / max(heights), 2) for h in heights) == [0.0, 0.5, 1.0]
    assert math.isclose(max(heights), 272.0)
