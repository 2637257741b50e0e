"""Faults from which a training goes on inside its job: restart, spare, companion."""

from __future__ import annotations

from typing import Any

from conftest import LabFactory
from jobs import Training, check_incident, start

from lab import Cluster

QUICK_HANG = "--robust-hang-floor=2"


def evicted(training: Training, node: str, left: str) -> None:
    """The node has been released from the running job, and stands accused with evidence."""
    training.until(lambda: training.nodes() == left, f"node list {left}", 10.0)
    record = training.accusations()[node]
    assert record["job"] == training.job and record["evidence"], record
    assert record["user"] == training.lab.user and record["time"] > 0


def roles(training: Training) -> dict[str, str]:
    """Node -> its role in the newest roster."""
    nodes: list[dict[str, Any]] = training.rosters()[-1]["nodes"]
    return {node["name"]: node["role"] for node in nodes}


# -- a rank dies: restart in place ------------------------------------------------------------


def test_killed_rank_restarts_in_place(lab: Cluster) -> None:
    training = start(lab, 2, 2, toy="--fault kill --at 13", steps=25)
    training.check_done()
    record = training.only_incident(
        symptom="crash", cause="unknown", action="restart", suspects=[], swaps=[], lost_steps=2
    )
    assert record["outcome"] == "recovered" and "rank 1 on " in record["evidence"][0]
    assert "SIGKILL" in record["evidence"][0]
    assert training.out().count("robust-srun: recovered from crash") == 1
    assert training.says(r"^step 11 .*\n(.*\n)*step 11 ")  # steps 11 and 12 were done again
    assert not training.accusations()
    roster = training.rosters()[-1]
    assert (roster["state"], roster["epoch"], roster["step"]) == ("done", 2, 25)


def test_one_rank_alone(lab: Cluster) -> None:
    training = start(lab, 1, toy="--fault kill --at 8 --rank 0", steps=15)
    training.check_done()
    training.only_incident(symptom="crash", action="restart", lost_steps=2)
