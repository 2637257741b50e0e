"""bench.simulate: its goals, ByteRobust's figures, and a soak from another soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.common import Results
from bench.faults.lost import Course, record_lost
from bench.simulate import __main__ as bench
from bench.simulate import lab
from bench.simulate.checks import Check
from bench.simulate.paper import was_checks


@pytest.mark.parametrize(
    ("check", "fine"),
    [
        (Check("at least", 0.995, 0.995, at_least=True), True),
        (Check("at least", 0.9949, 0.995, at_least=True), False),
        (Check("near", 1.09, 1.0, 0.1), True),
        (Check("near", 0.89, 1.0, 0.1), False),
        (Check("points", 0.57, 0.58, 0.02, points=True), True),
        (Check("points", 0.57, 0.60, 0.02, points=True), False),
        (Check("only printed", 9.0, 1.0, 0.1, judged=False), True),
    ],
)
def test_goals(check: Check, fine: bool) -> None:
    assert check.fine is fine
    assert check.said.startswith(check.name)


def test_waiting_for_machines_is_as_byterobust_says() -> None:
    results = Results("simulate")
    assert all(check.fine for check in was_checks(results))
    assert results.ratios["paper.was.standby/oracle"] == pytest.approx(1.0519, abs=0.001)


def test_the_bench_has_the_keys_that_readers_look_for(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    code = bench.main(["--quick", "--runs", "8", "--case", "approaches", "--json", str(file)])
    metrics = json.loads(file.read_text())["metrics"]
    assert code == 0
    ours, requeue = metrics["ours.ettr"]["median"], metrics["requeue.ettr"]["median"]
    assert ours >= bench.GOAL > metrics["byterobust.ettr"]["median"] > requeue
    assert metrics["ours.pool_0.ettr"]["median"] < metrics["ours.pool_16.ettr"]["median"]


def _soak(costs: dict[str, tuple[float, int]], minutes: float, between: float) -> dict[str, Any]:
    lost = sum(cost * count for cost, count in costs.values())
    rest = 60 * minutes - lost
    metrics = {"soak.minutes": minutes}
    metrics["soak.ettr"] = rest * (1 - between) / (60 * minutes)
    found = {name: {"median": value, "n": 1} for name, value in metrics.items()}
    for kind, (cost, count) in costs.items():
        found[f"{kind}.gap_s"] = {"median": cost, "n": count}
        found[f"{kind}.lost_mean_s"] = {"median": cost, "n": 1}
    return found


def test_a_soak_predicts_itself_and_one_with_other_counts() -> None:
    one = _soak({"hang": (21.0, 5), "kill": (0.3, 20)}, 10.0, 0.1)
    other = _soak({"hang": (21.0, 2), "kill": (0.3, 9)}, 30.0, 0.1)
    for source in (one, other):
        for target in (one, other):
            expected = target["soak.ettr"]["median"]
            assert lab.predict(source, target) == pytest.approx(expected, abs=1e-4)


def test_what_a_fault_cost_is_all_time_without_new_steps() -> None:
    # Steps 1 to 5 every second; a gap of 3 s, in which two steps are lost and made again.
    made = [(1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4), (5.0, 5), (8.0, 4), (9.0, 5), (10.0, 6)]
    course = Course(made, 1.0)
    assert course.lost(5.0, 10.0) == pytest.approx(4.0)
    assert course.lost(1.0, 5.0) == pytest.approx(0.0)


def test_a_soak_records_what_each_fault_cost() -> None:
    made = [(float(n), n) for n in range(1, 21)]
    made += [(26.0 + n, 21 + n) for n in range(10)]  # 5 s without a step after the 20th
    results = Results("soak", quick=True)
    record_lost(results, Course(made, 1.0), [("hang", 19.5, 30.0), ("kill", 31.5, 33.5)])
    found = {name: metric.median for name, metric in results.metrics.items()}
    assert found["hang.lost_mean_s"] == pytest.approx(4.5)
    assert found["kill.lost_mean_s"] == pytest.approx(0.0)
    assert found["soak.step_s"] == 1.0
    assert results.settings["lost_s in order"] == "hang 4.50, kill 0.00"
