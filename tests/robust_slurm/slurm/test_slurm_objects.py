"""The door's way to make and change partitions."""

from __future__ import annotations

import pytest
from fake_partitions import FakeJob, FakePartitions

from robust_slurm.slurm import SlurmError


def test_no_words_of_scontrol_come_in_by_a_name() -> None:
    slurm = FakePartitions(standby="s1")
    for name, settings in (
        ("a b", {}),
        ("a/b", {}),
        ("", {}),
        ("standby", {"Nodes": "s1 State=DOWN"}),
        ("standby", {"QoS": "a\nb"}),
    ):
        with pytest.raises(SlurmError) as caught:
            slurm.door().update_partition(name, settings)
        assert caught.value.kind == "invalid"
    assert slurm.orders == []


def test_placements() -> None:
    slurm = FakePartitions(standby="s1")
    slurm.jobs = {
        1: FakeJob("standby", "s[1-2,4]"),
        2: FakeJob("standby", "", "PENDING"),
        3: FakeJob("standby", "s9", "COMPLETED"),
        4: FakeJob("low", "s3", "COMPLETING"),
    }
    found = slurm.door().placements()
    assert {n: (p.partition, p.nodes) for n, p in found.items()} == {
        1: ("standby", ("s1", "s2", "s4")),
        4: ("low", ("s3",)),
    }
