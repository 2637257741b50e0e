"""Leases: who may have one, and when there may be any."""

from __future__ import annotations

from typing import Any

import pytest

from robust_slurm.slurm import JobPlacement, StandbyClaim
from robust_slurm.slurm.model import node_from, partition_from
from standby import leases
from standby.leases import LeaseWish


@pytest.mark.parametrize(
    ("sizes", "nodes", "may"),
    [
        ({1: 8, 2: 64}, 0, set()),
        ({1: 8, 2: 64}, 1, {2}),
        ({1: 8, 2: 64}, 5, {1, 2}),
        ({9: 8, 3: 8, 5: 4}, 1, {3}),  # of two of a size, the older one
        ({9: 8, 3: 8, 5: 4}, 2, {3, 9}),
    ],
)
def test_the_largest_jobs_first(sizes: dict[int, int], nodes: int, may: set[int]) -> None:
    wishes = [LeaseWish(job, size) for job, size in sizes.items()]
    assert leases.entitled(wishes, nodes) == may
    assert leases.entitled(wishes[::-1], nodes) == may  # whoever asks, in whatever order


def test_a_claim_counts_for_a_running_job_of_the_same_user() -> None:
    jobs = {
        1: JobPlacement("RUNNING", "train", "ann", ("n1", "n2")),
        2: JobPlacement("RUNNING", "train", "bob", ("n3", "n4", "n5")),
    }
    claims = [
        StandbyClaim(11, 1, "PENDING", "ann", ()),
        StandbyClaim(12, 2, "RUNNING", "ann", ("s1",)),  # not hers
        StandbyClaim(13, 7, "RUNNING", "ann", ("s2",)),  # has ended
    ]
    assert leases.wishes(LeaseWish(3, 4), claims, jobs) == [LeaseWish(3, 4), LeaseWish(1, 2)]


def test_nodes_that_leases_can_share() -> None:
    states = {
        "s1": "IDLE",
        "s2": "ALLOCATED",
        "s3": "ALLOCATED",
        "s4": "IDLE+DRAIN",
        "s5": "ALLOCATED+DRAIN",
    }
    nodes = [node_from({"NodeName": n, "State": s}) for n, s in states.items()]
    leased = ["s2", "s3", "s5"]
    assert leases.leasable(nodes, leased, ["s3"]) == 2  # s1, and s2's lease


def test_leases_have_nodes_of_one_size() -> None:
    sizes = {"s1": (16, 16, 900), "s2": (16, 14, 800), "s3": (16, 14, 700), "s4": (32, 32, 600)}
    nodes = [
        node_from({"NodeName": n, "State": "IDLE", "CPUTot": str(all_of_them),
                   "CPUEfctv": str(for_jobs), "RealMemory": str(memory)})
        for n, (all_of_them, for_jobs, memory) in sizes.items()
    ]  # fmt: skip
    found = leases.alike(nodes)
    assert ([n.name for n in found.nodes], found.cpus, found.memory) == (["s2", "s3"], 14, 700)
    assert leases.alike([]) == ([], 1, 0)


ON = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}


@pytest.mark.parametrize(
    ("name", "changed", "config", "why"),
    [
        ("", {}, ON, ""),
        ("lease", {"State": "DOWN"}, ON, "no partition 'lease' that is up"),
        ("lease", {"PriorityTier": "100"}, ON, "no lower PriorityTier than standby"),
        ("lease", {"PreemptMode": "OFF"}, ON, "lease has not PreemptMode=CANCEL"),
        ("lease", {"PreemptMode": "REQUEUE"}, ON, "lease has not PreemptMode=CANCEL"),
        ("lease", {"OverSubscribe": "NO"}, ON, "lease has not OverSubscribe=FORCE:1"),
        ("lease", {"Nodes": "s[1-2]"}, ON, "lease has nodes that standby has not"),
        ("lease-held", {"Nodes": "s2"}, ON, "lease has nodes that lease-held has not"),
        ("lease-held", {"PreemptMode": "CANCEL"}, ON, "lease-held has not PreemptMode=OFF"),
        ("lease-held", {"OverSubscribe": "EXCLUSIVE"}, ON, "lease-held has not OverSubscribe"),
        ("lease-held", {"PriorityTier": "0"}, ON, "no lower PriorityTier than lease-held"),
        ("", {}, {**ON, "PreemptType": "preempt/none"}, "Slurm preempts no jobs"),
        ("", {}, {**ON, "PreemptMode": "OFF"}, "Slurm preempts no jobs"),
        ("", {}, {**ON, "PreemptExemptTime": "00:00:00", "PreemptParameters": "(null)"}, ""),
        ("", {}, {**ON, "PreemptExemptTime": "01:00:00"}, "PreemptExemptTime=01:00:00"),
        ("", {}, {**ON, "PreemptMode": "REQUEUE,PRIORITY"}, "PreemptMode=REQUEUE,PRIORITY"),
        ("", {}, {**ON, "PreemptParameters": "x,min_exempt_priority=9"}, "min_exempt_priority=9"),
    ],
)
def test_no_lease_that_would_keep_a_node(
    name: str, changed: dict[str, str], config: dict[str, str], why: str
) -> None:
    given: dict[str, Any] = {
        "standby": {"PriorityTier": "100", "PreemptMode": "OFF"},
        **leases.settings("lease"),
    }
    if name:
        given[name] = {**given[name], **changed}
    partitions = {
        n: partition_from({"State": "UP", "Nodes": "s1", **words, "PartitionName": n})
        for n, words in given.items()
    }
    found = leases.obstacle("lease", "standby", partitions, config)
    assert why in found
    assert bool(found) == bool(why)
