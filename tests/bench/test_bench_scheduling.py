"""bench.scheduling: the formula against numbers by hand, and what T is put together from."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduling_records import FULL, OLD, WAIT, incident, record, t

from bench.scheduling.model import (
    STRATEGIES,
    MissingError,
    Times,
    at_once,
    average,
    compose,
    scaled,
    scheduling_time,
    seconds,
    weights,
    with_switch,
)
from robust_slurm.config import Config
from standby.size.count import LossSource, losses

P = 1.2e-3


# ---------------------------------------------------------------- the formula


def test_weights_by_hand() -> None:
    """128 machines, P99 pool 2: b(2) / b(1) = 127 / 2 * p / (1 - p) = 0.0762916."""
    found = weights(losses(128, [LossSource(1, P)]), 2)
    assert found == pytest.approx({1: 1 / 1.0762916, 2: 0.0762916 / 1.0762916}, rel=1e-6)


@pytest.mark.parametrize(
    ("machines", "most", "switch", "was"),
    [
        # T(k) = k. Relative weights by the ratio of neighbours, (N - k) / (k + 1) * p / (1 - p):
        (128, 2, 100.0, 0.99 * (1 + 2 * 0.0762916) / 1.0762916 + 1.0),
        # 1, 0.614538, 0.251526, 0.077135
        (1024, 4, 32.0, 0.99 * 3.292196 / 1.943199 + 0.32),
    ],
)
def test_average_by_hand(machines: int, most: int, switch: float, was: float) -> None:
    by_count = weights(losses(machines, [LossSource(1, P)]), most)
    found = average(by_count, [t(k, 2 * k) for k in by_count], t(switch, 3 * switch))
    assert found.median == pytest.approx(was, rel=1e-5)
    assert found.p95 == pytest.approx(2 * was + 0.01 * switch, rel=1e-5)
    assert found.n == 20


def test_a_time_that_never_changes_is_the_average() -> None:
    by_count = weights(losses(512, [LossSource(1, P)]), 3)
    assert sum(by_count.values()) == pytest.approx(1.0)
    assert average(by_count, [t(7.0)] * 3, t(7.0)).median == pytest.approx(7.0)


# ---------------------------------------------------------------- T(k)

TIMES = Times(
    spare={1: t(1.0), 3: t(2.0)},
    standby={1: t(3.0)},
    reschedule=t(10.0),
    requeue=t(100.0),
    last_rung=t(130.0),
    fewer=t(31.0),
)
LEASE = replace(TIMES, leased=t(1.1))


@pytest.mark.parametrize(
    ("strategy", "k", "pool", "expected"),
    [
        ("oracle", 1, 0, 1.0),
        ("oracle", 2, 0, 2.0),  # 2 at once were not measured: not faster than 3
        ("oracle", 32, 0, 2.0),
        ("ours_spare", 2, 2, 2.0),
        ("ours_spare", 3, 2, 10.0),
        ("ours_standby", 2, 2, 3.0),
        ("ours_standby", 3, 2, 10.0),
        ("reschedule", 1, 2, 10.0),
        ("requeue", 1, 2, 100.0),
        ("ours_leased", 1, 2, 1.1),
        ("ours_leased", 2, 2, 3.0),  # a job has one lease
        ("ours_leased", 1, 0, 10.0),
        ("ours_leased", 3, 2, 10.0),
        ("ours_fewer", 1, 2, 1.1),
        ("ours_fewer", 2, 2, 3.0),
        ("ours_fewer", 3, 2, 31.0),
    ],
)
def test_time_of_k_machines(strategy: str, k: int, pool: int, expected: float) -> None:
    assert seconds(LEASE, strategy, k, pool).median == expected


@pytest.mark.parametrize(
    ("strategy", "pool", "left", "expected"),
    [
        ("oracle", 2, False, 2.0),
        ("ours_spare", 2, False, 130.0),
        ("ours_standby", 2, False, 130.0),
        ("ours_leased", 2, False, 130.0),
        ("ours_fewer", 2, False, 31.0),
        ("ours_fewer", 32, False, 3.0),
        ("ours_standby", 32, False, 3.0),
        ("reschedule", 2, False, 100.0),
        ("requeue", 2, False, 100.0),
        ("ours_spare", 2, True, 10.0),
        ("ours_standby", 32, True, 3.0),
        ("reschedule", 2, True, 10.0),
        ("requeue", 2, True, 100.0),
    ],
)
def test_time_of_a_switch(strategy: str, pool: int, left: bool, expected: float) -> None:
    assert with_switch(LEASE, strategy, pool, left).median == expected


def test_at_once_never_takes_a_smaller_count_for_a_larger_one_that_was_measured() -> None:
    assert [at_once(TIMES.spare, k).median for k in (1, 2, 3, 4)] == [1.0, 2.0, 2.0, 2.0]


ordered = st.lists(st.floats(0.001, 1000.0), min_size=4, max_size=4).map(sorted)


@given(ordered, st.sampled_from([128, 256, 512, 1024]), st.integers(0, 40))
def test_order_of_the_strategies(four: list[float], machines: int, pool: int) -> None:
    """With any pool, slower means make a slower strategy, if all find machines."""
    spare, standby, reschedule, requeue = (t(s) for s in four)
    times = Times({1: spare}, {1: standby}, reschedule, requeue, requeue, requeue)
    lost = losses(machines, [LossSource(1, P)])
    found = [scheduling_time(times, s, lost, 4, pool, True).median for s in STRATEGIES]
    assert all(a <= b * (1 + 1e-9) for a, b in itertools.pairwise(found))


def test_without_machines_left_all_but_the_oracle_wait_for_the_queue() -> None:
    lost = losses(128, [LossSource(1, P)])
    found = {s: scheduling_time(TIMES, s, lost, 2, 2, False).median for s in STRATEGIES}
    swap = 0.99 * (1.0 + 2.0 * 0.0762916) / 1.0762916
    assert found["oracle"] == pytest.approx(swap + 0.01 * 2.0, rel=1e-6)
    assert found["ours_spare"] == pytest.approx(swap + 0.01 * 130.0, rel=1e-6)
    assert found["reschedule"] == pytest.approx(0.99 * 10.0 + 0.01 * 100.0)
    assert found["requeue"] == pytest.approx(100.0)


# ---------------------------------------------------------------- what T is put together from


def test_compose_takes_what_was_measured() -> None:
    times = compose(FULL, wait=WAIT)
    assert times.spare[1].median == pytest.approx(0.5)
    assert times.spare[1].p95 == pytest.approx(1.0)
    assert times.standby[1].median == pytest.approx(0.9)
    # decide, stop, replace of the standby node; then all ranks as if cold.
    assert times.reschedule.median == pytest.approx(0.1 + 0.4 + 13.1)
    assert times.requeue.median == pytest.approx(122.0)
    assert times.last_rung.median == pytest.approx(0.1 + WAIT + 122.0)
    assert times.last_rung.p95 == pytest.approx(0.2 + WAIT + 244.0)
    assert times.last_rung.n == 20
    assert "rank_kill_torch_cold.(restore+launch+first_step)" in times.reschedule.source
    assert "standby_wait 30 s" in times.last_rung.source


def test_compose_of_an_older_record() -> None:
    times = compose(OLD, wait=WAIT)
    assert times.spare[1].median == pytest.approx(9.2)
    assert times.standby[1].median == pytest.approx(9.2 + 0.4)
    assert times.reschedule == times.standby[1], "all its starts are cold"
    assert times.standby[1].source.endswith("+ node_crash_standby.replace")


def test_measured_directly_wins() -> None:
    more = record(
        node_crash_standby_torch_cold=incident(1.5, 0.0, 0.1, 0.4, 0.0, 0.1, 7.0),
        node_crash_3_spare_torch=incident(1.5, 0.0, 0.1, 0.0, 0.0, 0.1, 0.6),
        pool_short_torch={"detect": 1.5, "total": 41.5},
    )
    times = compose({**FULL, **more}, wait=WAIT)
    assert times.reschedule.median == pytest.approx(7.6)
    assert {k: term.median for k, term in times.spare.items()} == pytest.approx({1: 0.5, 3: 0.8})
    assert set(times.standby) == {1}
    assert times.last_rung.median == pytest.approx(40.0)


def test_leases_and_fewer_machines() -> None:
    bare = compose(FULL, wait=WAIT)
    assert bare.strategies() == (*STRATEGIES, "ours_fewer"), "no lease was measured"
    # The survivors start as beside a spare, after the wait for a standby node.
    assert bare.fewer.median == pytest.approx(0.1 + Config().shrink_wait + 0.4)
    more = record(
        node_crash_leased_torch=incident(0.5, 0.0, 0.1, 0.02, 0.05, 0.05, 0.3),
        shrink=incident(0.5, 0.0, 0.2, 1.0, 0.1, 0.1, 0.5),  # with another wait
    )
    times = compose({**FULL, **more}, wait=WAIT)
    assert times.leased is not None and times.leased.median == pytest.approx(0.52)
    assert times.fewer.median == pytest.approx(0.2 + Config().shrink_wait + 0.7)
    assert times.ours() == ["ours_spare", "ours_standby", "ours_leased", "ours_fewer"]


def test_reinstall_is_paid_by_machines_from_outside_the_pool() -> None:
    bare, dear = compose(FULL, wait=WAIT), compose(FULL, wait=WAIT, reinstall=60.0)
    assert dear.spare == bare.spare and dear.standby == bare.standby
    for name in ("reschedule", "requeue", "last_rung"):
        assert getattr(dear, name).median == pytest.approx(getattr(bare, name).median + 60.0)
        assert getattr(dear, name).source.endswith("reinstall 60 s")
        assert "reinstall" not in getattr(bare, name).source


def test_orders_to_start_grow_with_the_machines() -> None:
    orders = t(0.25, 0.5)
    few, many = scaled(TIMES, orders, 125), scaled(TIMES, orders, 1250)
    assert few.spare[1].median == pytest.approx(1.025)
    assert many.spare[3].median == pytest.approx(2.25)
    assert many.standby[1].p95 == pytest.approx(3.5)
    assert many.reschedule.median == pytest.approx(10.25)
    assert many.fewer.median == pytest.approx(31.25) and many.leased is None
    assert (many.requeue, many.last_rung) == (TIMES.requeue, TIMES.last_rung)


@pytest.mark.parametrize("missing", ["plain_requeue.total_s", "node_crash_spare_torch.stop_s"])
def test_what_is_missing_is_named(missing: str) -> None:
    with pytest.raises(MissingError, match=missing):
        compose({name: value for name, value in FULL.items() if name != missing})
