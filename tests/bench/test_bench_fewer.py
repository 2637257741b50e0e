"""bench.fewer: when a machine is lost, which steps of replicas count, what is shown and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import Results
from bench.fewer.__main__ import LONG, add, compare
from bench.fewer.replicas import Running, committed, tail
from bench.fewer.site import Schedule


@pytest.mark.parametrize(
    ("schedule", "losses"),
    [
        (LONG, [60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 420.0, 480.0, 540.0]),
        (Schedule(100.0, 60.0, 30.0), [60.0]),
        (Schedule(90.0, 60.0, 30.0), [60.0]),  # repaired at the very end
        (Schedule(89.0, 60.0, 30.0), []),
    ],
)
def test_each_machine_that_is_lost_is_replaced_in_the_time(
    schedule: Schedule, losses: list[float]
) -> None:
    assert schedule.losses() == losses


@pytest.mark.parametrize(
    ("steps", "counts"),
    [
        ([1152, 1152, 236, 1152], 1152),  # one has just come: its step was taken for all
        ([1152, 236, 236, 236], 236),  # one went on alone
        ([10, 10, 9, 9], 9),
        ([10, 10, 9], 10),
        ([7], 7),
    ],
)
def test_a_step_counts_when_a_majority_of_the_replicas_has_committed_it(
    steps: list[int], counts: int
) -> None:
    assert committed(steps) == counts


def test_only_a_replica_whose_machine_is_there_has_ended_by_itself() -> None:
    lost: list[str] = []
    running = Running(lambda: lost)
    for node, code in (("n1", "import sys; sys.exit(3)"), ("n2", "pass"), ("n3", "input()")):
        running.processes[node] = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE
        )
    lost.append("n2")
    for node in ("n1", "n2"):
        running.processes[node].wait()
    assert running.ended() == [("n1", 3)]
    running.processes["n3"].communicate()
    assert [node for node, _code in running.ended()] == ["n1", "n3"]


def test_the_end_of_an_output_says_where_all_of_it_lies(tmp_path: Path) -> None:
    output = tmp_path / "replica-n1.log"
    assert tail(output) == f"{output}: no output"
    output.write_text("".join(f"line {n}\n" for n in range(100)))
    assert tail(output, 2) == f"{output}, the end of 100 lines:\nline 98\nline 99"


def test_a_side_that_made_no_step_is_wrong_and_has_no_ratio() -> None:
    results = Results("fewer", quick=True)
    assert add(results, "fewer", {"steps": 100})
    assert add(results, "requeue", {"steps": 10})
    assert not add(results, "torchft", {"steps": -21, "restarts": 4})
    compare(results)
    assert results.metrics["torchft.restarts"].median == 4
    assert results.ratios == {"fewer/requeue": 10.0}, "-21 steps had a ratio of -209"


def test_no_ratio_without_the_side_that_goes_on_with_fewer() -> None:
    results = Results("fewer", quick=True)
    add(results, "torchft", {"steps": 10, "restarts": 0})
    compare(results)
    assert not results.ratios
