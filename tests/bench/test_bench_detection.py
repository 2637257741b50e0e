"""bench.detection: a day of stumbles, walked through with the product's own verdict."""

from __future__ import annotations

import random
from statistics import median

import pytest

from bench.detection.__main__ import LARGE, SMALL, Day
from bench.detection.simulate import NEVER, Seen, Signs, Stumble, walk
from bench.detection.stumbles import Kind
from robust_slurm.config import Config
from srun_wrapper.detect.unreachable import SilencePatience

LIMIT = Config().unreachable_limit
KINDS = [
    Kind("gc", "process", 24.0, (0.1, 0.9)),
    Kind("outage", "network", 24.0, (), (0.02, 0.3)),
    Kind("pause", "machine", 24.0, (), (0.02, 0.3)),
    Kind("leaf", "group", 240.0, (), (0.05, 0.7)),
    Kind("supervisor", "supervisor", 240.0, (), (0.05, 2.0)),
]


def walks(stumble: Stumble, signs: Signs, limit: float = LIMIT) -> list[Seen]:
    random_ = random.Random(1)
    return [walk(stumble, signs, SilencePatience(limit), random_) for _ in range(300)]


def test_no_stumble_costs_a_node_its_place() -> None:
    for signs in (SMALL, LARGE):
        came, before, now = Day(20, signs, 24.0, seed=1).run(KINDS)
        assert min(came.values()) >= 240 and (before, now) == (0, 0)


@pytest.mark.parametrize(("signs", "before", "now"), [(SMALL, 1.3, 0.5), (LARGE, 2.0, 0.95)])
def test_a_crash_is_seen_in_less_than_half_the_time(
    signs: Signs, before: float, now: float
) -> None:
    seen = walks(Stumble("machine", NEVER), signs)
    assert median(one.before for one in seen) <= before
    assert median(one.now for one in seen) <= now


@pytest.mark.parametrize(
    ("what", "length", "before", "now"),
    [
        ("network", 0.4, False, False),
        ("network", 0.6, False, True),  # what is accepted: as long as a crash, until it ends
        ("network", 1.5, True, True),
        ("process", 5.0, False, False),
    ],
)
def test_what_one_stumble_costs(what: str, length: float, before: bool, now: bool) -> None:
    seen = walks(Stumble(what, length), SMALL)
    assert all(one.before < NEVER for one in seen) is before
    assert all(one.now < NEVER for one in seen) is now
    assert any(one.now < NEVER for one in seen) is now


def test_lost_packets_cost_no_more_than_before() -> None:
    for one in walks(Stumble("packets", 8.0, loss=0.25), SMALL):
        assert one.now == NEVER or one.now > 1.0  # by silence alone


def test_switched_off_all_is_as_before() -> None:
    reports = Signs(SMALL.report, SMALL.report)
    assert all(one.now >= 1.0 for one in walks(Stumble("machine", NEVER), reports, limit=0.0))
