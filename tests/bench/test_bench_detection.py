"""bench.detection: a day of stumbles, walked through with the product's own verdict."""

from __future__ import annotations

import random
from statistics import median

import pytest

from bench.detection.__main__ import Day
from bench.detection.simulate import NEVER, Seen, Stumble, walk
from bench.detection.stumbles import Kind
from robust_slurm.config import Config
from srun_wrapper.detect.unreachable import Patience

LIMIT = Config().unreachable_limit
KINDS = [
    Kind("gc", "process", 24.0, (0.1, 0.9)),
    Kind("outage", "network", 24.0, (), (0.02, 0.3)),
    Kind("pause", "machine", 24.0, (), (0.02, 0.3)),
    Kind("leaf", "group", 240.0, (), (0.05, 0.7)),
    Kind("supervisor", "supervisor", 240.0, (), (0.05, 2.0)),
]


def walks(stumble: Stumble, interval: float, limit: float = LIMIT) -> list[Seen]:
    random_ = random.Random(1)
    return [walk(stumble, interval, Patience(limit), random_) for _ in range(300)]


def test_no_stumble_costs_a_node_its_place() -> None:
    for interval in (0.25, 1.0):
        came, before, now = Day(20, interval, 24.0, seed=1).run(KINDS)
        assert min(came.values()) >= 240 and (before, now) == (0, 0)


@pytest.mark.parametrize(("interval", "before", "now"), [(0.25, 1.3, 0.5), (1.0, 2.0, 0.9)])
def test_a_crash_is_seen_in_less_than_half_the_time(
    interval: float, before: float, now: float
) -> None:
    seen = walks(Stumble("machine", NEVER), interval)
    assert median(one.before for one in seen) <= before
    assert median(one.now for one in seen) <= now
    assert all(one.now <= one.before for one in seen)


@pytest.mark.parametrize(
    ("what", "length", "before", "now"),
    [
        ("network", 0.3, False, False),
        ("network", 0.6, False, True),  # what is accepted: as long as a crash, until it ends
        ("network", 1.5, True, True),
        ("process", 5.0, False, False),
    ],
)
def test_what_one_stumble_costs(what: str, length: float, before: bool, now: bool) -> None:
    seen = walks(Stumble(what, length), 0.25)
    assert all(one.before < NEVER for one in seen) is before
    assert all(one.now < NEVER for one in seen) is now
    assert any(one.now < NEVER for one in seen) is now


def test_lost_packets_cost_no_more_than_before() -> None:
    for one in walks(Stumble("packets", 8.0, loss=0.25), 0.25):
        assert one.now == one.before


def test_switched_off_all_is_as_before() -> None:
    for stumble in (Stumble("machine", NEVER), Stumble("network", 0.7)):
        assert all(one.now == one.before for one in walks(stumble, 0.25, limit=0.0))
