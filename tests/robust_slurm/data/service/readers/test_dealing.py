"""The number of readers and the lanes of each, as tables."""

from __future__ import annotations

import pytest

from robust_slurm.data.lanes.tally import Figures
from robust_slurm.data.service.readers.dealing import MOST, Spell, dealt, lane_loads, readers_wanted


@pytest.mark.parametrize(
    ("now", "lasted", "waited", "worked", "cores", "then", "why"),
    [
        (0, 0.9, 0.9, 0.9, 8, None, "too short to judge"),
        (0, 1.0, 1.0, 0.9, 8, 2, "ranks wait, and this process decodes all the time"),
        (0, 1.0, 1.0, 0.9, 1, 0, "there is one core"),
        (0, 1.0, 1.0, 0.2, 8, 0, "ranks wait for files, or for the planner"),
        (0, 40.0, 0.0, 39.0, 8, 0, "nobody waits"),
        (2, 1.0, 1.0, 1.8, 8, 3, "more"),
        (6, 1.0, 1.0, 5.0, 128, 9, "in larger steps"),
        (6, 1.0, 1.0, 5.0, 8, 8, "as many as cores"),
        (64, 1.0, 1.0, 60.0, 256, MOST, "as many as there may be"),
        (2, 1.0, 1.0, 0.9, 8, 2, "they wait for files"),
        (2, 20.0, 0.1, 0.1, 8, None, "too short to judge that they are idle"),
        (3, 30.0, 0.1, 0.7, 8, 2, "two would be half idle"),
        (3, 30.0, 0.1, 50.0, 8, 3, "they are needed"),
        (3, 30.0, 0.5, 0.1, 8, 3, "ranks have waited"),
        (2, 30.0, 0.0, 7.0, 8, 0, "this process can do it"),
        (2, 30.0, 0.0, 8.0, 8, 2, "it would take a quarter of its time"),
        (8, 0.1, 0.0, 0.0, 4, 4, "the job has fewer cores now"),
        (2, 0.1, 0.0, 0.0, 1, 0, "one core"),
    ],
)
def test_the_number_follows_from_waits_work_and_cores(
    now: int, lasted: float, waited: float, worked: float, cores: int, then: int | None, why: str
) -> None:
    assert readers_wanted(now, Spell(lasted, waited, worked), cores) == then, why


def test_a_lanes_load_is_what_its_source_costs_and_gives() -> None:
    lanes = {"web": 2, "code": 1, "new": 1, "off": 1}
    figures = {
        "web": Figures(10, 0, 1000, 1.0),
        "code": Figures(10, 0, 1000, 4.0),
        "new": Figures(0, 0, 0, 0.0),
        "off": Figures(10, 0, 1000, 1.0),
    }
    parts = {"web": 8, "code": 1, "new": 1}
    found = lane_loads(lanes, figures, parts, by_tokens=True)
    assert found == pytest.approx(
        {("web", 0): 0.004, ("web", 1): 0.004, ("code", 0): 0.004, ("new", 0): 0.002, ("off", 0): 0}
    )
    found = lane_loads(lanes, figures, parts, by_tokens=False)
    assert found["web", 0] == pytest.approx(0.4)
    alike = lane_loads(lanes, {}, {}, by_tokens=True)  # the mixture to come is not known yet
    assert alike["code", 0] == alike["off", 0] == 2 * alike["web", 0] > 0


LANES = [("web", lane) for lane in range(4)] + [("code", lane) for lane in range(2)]


@pytest.mark.parametrize(
    ("loads", "count", "before", "then"),
    [
        ([1, 1, 1, 1, 1, 1], 2, {}, [3, 3]),
        ([8, 8, 8, 8, 1, 1], 2, {}, [17, 17]),
        ([9, 1, 1, 1, 1, 1], 2, {}, [9, 5]),
        ([0, 0, 0, 0, 0, 0], 3, {}, [0, 0, 0]),
        ([1, 1, 1, 1, 1, 1], 3, {(n, at): at % 2 for n, at in LANES}, [2, 2, 2]),
        ([4, 4, 4, 4, 8, 8], 2, {(n, at): int(n == "web") for n, at in LANES}, [16, 16]),
        ([1, 1, 1, 1, 8, 8], 2, {(n, at): int(n == "web") for n, at in LANES}, [12, 8]),
    ],
)
def test_lanes_are_dealt_evenly(
    loads: list[float], count: int, before: dict[tuple[str, int], int], then: list[float]
) -> None:
    by_lane = dict(zip(LANES, loads, strict=True))
    places = dealt(by_lane, count, before)
    assert places.keys() == by_lane.keys()
    sums = [
        sum(by_lane[lane] for lane, at in places.items() if at == each) for each in range(count)
    ]
    assert sorted(sums) == sorted(then)
    assert dealt(by_lane, count, places) == places, "they stay"
    if not any(loads):
        assert sorted(places.values()) == [0, 0, 1, 1, 2, 2]


def test_lanes_stay_where_they_are_while_it_is_even_enough() -> None:
    loads = dict.fromkeys(LANES, 1.0)
    before = dealt(loads, 2, {})
    assert dealt({**loads, LANES[0]: 1.4}, 2, before) == before
    after = dealt({**loads, LANES[0]: 4.0}, 2, before)
    assert 0 < sum(after[lane] != before[lane] for lane in LANES) <= 2
    assert set(dealt(loads, 1, before).values()) == {0}
