"""A rank that is stuck outside a collective is named within seconds, its machine too, nobody else.

A closer look follows: torch's flight recorders.

Naming is not acting: the job runs to its end without a restart once the rank goes on.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from jobs import TORCH, Training, prepared
from places import CLUSTER

from lab import Cluster, Lab

pytest.importorskip("torch")

SCRIPT = CLUSTER / "stuck_ddp.py"
WAIT = 120.0  # s; importing torch in every rank is most of it
WORLD, STUCK, NODE = 4, 3, "n2"
SOON = 5.0  # s, and three steps as slow as the slowest


class Stuck(Training):
    def exports(self) -> dict[str, str]:
        return super().exports() | TORCH


def run(lab: Lab, launcher: str, per_node: int, words: str = "") -> tuple[Stuck, dict[str, Any]]:
    """Run it until the stuck rank is located and to its end. Return the event, too."""
    training = Stuck(lab, prepared(lab, WORLD).dir, WORLD, 40)
    command = f"{SCRIPT} --dir {training.dir} --rank {STUCK} {words}"
    size = ["-N2", f"--ntasks-per-node={per_node}"]
    training.submit(f"robust-srun {launcher} {command}", size)
    stuck = training.dir / "stuck"
    training.until(stuck.exists, "the stuck rank", WAIT)
    training.until(lambda: training.events("located"), "its place", 30.0)
    (event,) = training.events("located")
    since = stuck.stat().st_mtime
    print(f"located {event['time'] - since:.2f} s after it, {event['silent']} s without a step")
    print("\n".join(event["lines"]))
    assert event["time"] - since < SOON + 3 * step_time(training), training.story()
    training.until(lambda: training.events("looked_closer"), "a closer look", 30.0)
    (training.dir / "go").touch()
    assert training.wait_end(WAIT) == 0, training.story()
    assert not training.incidents()
    assert [*map(training.says, (f"^rank {rank} done" for rank in range(WORLD)))] == [True] * WORLD
    training.check_gone()
    return training, event


def step_time(training: Training) -> float:
    return float(training.rosters()[-1]["step_time_s"] or 0.0)


def check(training: Training, event: dict[str, Any]) -> None:
    assert (event["ranks"], event["nodes"]) == ([STUCK], [NODE]), training.story()
    first, second = event["lines"][:2]
    assert first.endswith(f"the other 3 wait for it; node: {NODE}")
    assert second.startswith(f"rank {STUCK} on {NODE}: in ")
    assert any(
        re.match(r"ranks 0-2 on n\[1-2\]: waiting in .*all_reduce", line) for line in event["lines"]
    )
    assert training.says(rf"^robust-srun: no step for [\d.]+ s: rank {STUCK} is in no collective")
    check_closer(training)


def check_closer(training: Training) -> None:
    """torch's flight recorders name the same rank."""
    (recorders,) = training.events("looked_closer")
    (first,) = recorders["lines"]
    print(first)
    assert re.fullmatch(
        rf"flight recorder: rank {STUCK} has not entered all_reduce #\d+ of group 0 "
        r"\(default_pg\); the other 3 have waited in it for [\d.]+ s",
        first,
    ), recorders


def check_child(event: dict[str, Any]) -> None:
    """The rank's killed child, for which it has not waited, is shown."""
    seen = rf"rank {STUCK} on {NODE}: killed and not waited for: its child \d+ \(sleep\) by SIGKILL"
    assert any(re.fullmatch(seen, line) for line in event["lines"]), event


def test_a_rank_outside_a_collective(lab: Cluster) -> None:
    training, event = run(lab, "python", 2)
    check(training, event)
    assert "in stuck (" in event["lines"][1]
    check_child(event)


def test_a_rank_of_torchrun(lab: Cluster) -> None:
    training, event = run(lab, "torchrun --nnodes=2 --nproc-per-node=2", 1)
    check(training, event)
    assert "in stuck (" in event["lines"][1]
    check_child(event)


def test_a_deadlocked_worker_of_a_loader(lab: Cluster) -> None:
    training, event = run(lab, "python", 2, "--loader")
    check(training, event)
    worker = next(line for line in event["lines"] if line.startswith("its data-loader worker"))
    assert "in stuck (" in worker
