"""--robust-place: ranks follow the network, at the start and after a swap."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from jobs import start

from lab import Cluster


@pytest.fixture
def lab() -> Iterator[Cluster]:
    """n1, n3, n5 under one switch; n2, n4 and both standbys under the other."""
    with Cluster(nodes=5, standby=2, switches=["n[1,3,5],s1", "n[2,4],s2"]) as made:
        yield made


def test_pipelines_stay_under_one_switch(lab: Cluster) -> None:
    """Megatron has DP groups of consecutive ranks: pipelines are ranks 0 and 2, 1 and 3."""
    place = "--robust-place --robust-mesh=pp=2,dp=2 --robust-place-alpha=0"
    training = start(lab, 4, robust=place, toy="--step-time 0.1", sbatch="-w n[1-4]")
    training.wait_step(5)
    assert [epoch["nodes"] for epoch in training.events("epoch")] == [["n1", "n2", "n3", "n4"]]
    training.check_done()


def test_ranks_follow_the_network_and_so_does_a_standby(lab: Cluster) -> None:
    place = "--robust-place --robust-mesh=dp=2,pp=2 --robust-place-alpha=0"
    training = start(lab, 4, robust=place, toy="--step-time 0.1", sbatch="-w n[1-4]")
    training.wait_step(5)
    (said,) = training.events("placed")
    assert said["nodes"] == ["n1", "n3", "n2", "n4"]
    assert training.says("switches per DP group: at most 2, per PP group: 1 [(]were 1 and 2[)]")
    lab.crash("n4")
    training.check_done()
    training.only_incident(outcome="recovered", swaps=[["n4", "s2"]])
    assert [e["nodes"][3] for e in training.events("epoch")] == ["n4", "s2"]


def test_spares_are_left_over_where_they_are_not_needed(lab: Cluster) -> None:
    training = start(
        lab, 3, robust="--robust-place", toy="--step-time 0.1", spares=2, sbatch="-w n[1-5]"
    )
    training.wait_step(5)
    assert training.events("epoch")[0]["nodes"] == ["n1", "n3", "n5"]
    lab.crash("n3")
    training.check_done()
    (incident,) = training.incidents()
    assert incident["outcome"] == "recovered"
