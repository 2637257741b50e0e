"""Leases: idle standby nodes that wait warm for a job until another job needs them. Pure.

A lease is a Slurm job in a partition over the pool's nodes whose jobs Slurm preempts as soon as
another job asks the pool for their node. Once ranks run on the node, the lease must stay, but a
running job cannot change its partition. So a second job of the same user, in the partition
``held(…)`` over the same nodes, shares the node's processors with the lease. That job is never
preempted, so no other job gets the node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from robust_slurm.slurm import JobPlacement, Partition, SlurmNode, StandbyClaim

LEASE_TIER, HELD_TIER = 0, 1  # PriorityTier; the pool's is higher than both
SHARED = "FORCE:1"  # OverSubscribe: the two jobs of a node share its processors
_EXEMPT: Mapping[str, Callable[[str], bool]] = {
    "PreemptMode": lambda text: "PRIORITY" in text.upper().split(","),
    "PreemptExemptTime": lambda text: text not in ("", "(null)", "NONE", "00:00:00"),
    "PreemptParameters": lambda text: "min_exempt_priority" in text,
}
"""Settings of slurm.conf that can exempt a job from preemption, whatever its partition says."""


class LeaseWish(NamedTuple):
    """A running job that has a lease, or waits for one. ``size``: nodes of the training."""

    job: int
    size: int


def held(partition: str) -> str:
    """Return the name of the partition whose jobs keep leased nodes on which ranks run."""
    return f"{partition}-held" if partition else ""


def settings(partition: str) -> dict[str, dict[str, str]]:
    """Return the two partitions, and the settings of each."""
    shared = {"OverSubscribe": SHARED}
    return {
        partition: {"PriorityTier": str(LEASE_TIER), "PreemptMode": "CANCEL", **shared},
        held(partition): {"PriorityTier": str(HELD_TIER), "PreemptMode": "OFF", **shared},
    }


def held_nodes(partition: str, jobs: Iterable[JobPlacement]) -> frozenset[str]:
    """The nodes of leases that have ranks."""
    return frozenset(n for job in jobs if job.partition == held(partition) for n in job.nodes)


def wishes(
    own: LeaseWish, claims: Iterable[StandbyClaim], jobs: Mapping[int, JobPlacement]
) -> list[LeaseWish]:
    """Return every running job that has or awaits a lease, with its size as Slurm reports it.

    A claim counts for a job of the same user only.
    """
    found = {own.job: own}
    for claim in claims:
        of = jobs.get(claim.of)
        if of is not None and of.user == claim.user:
            found.setdefault(claim.of, LeaseWish(claim.of, len(of.nodes)))
    return list(found.values())


def entitled(found: Iterable[LeaseWish], nodes: int) -> frozenset[int]:
    """Return the jobs that may have a lease when ``nodes`` nodes are available for leases.

    Each job gets at most one, the largest jobs first: a fault stops all nodes of a job for the time
    that a lease saves, and a job of more nodes fails sooner. Of two jobs of equal size, the older
    one is first.
    """
    order = sorted(found, key=lambda wish: (-wish.size, wish.job))
    return frozenset(wish.job for wish in order[:nodes])


def leasable(nodes: Iterable[SlurmNode], leased: Iterable[str], taken: Iterable[str]) -> int:
    """Return the number of nodes available for leases: idle, or ``leased`` and without ranks.

    A drained node does not count: once it is released, Slurm allocates it to no job.
    """
    kept = set(leased) - set(taken)
    return sum(node.idle or (node.usable and node.name in kept) for node in nodes)


def obstacle(
    partition: str, pool: str, partitions: Mapping[str, Partition], config: Mapping[str, str]
) -> str:
    """Return why a lease in this partition would keep its node from other jobs; "" if it would not.

    A partition of that name may be someone else's: its settings must be those of ``settings``.
    """
    for name in (partition, held(partition), pool):
        if name not in partitions or partitions[name].state != "UP":
            return f"there is no partition {name!r} that is up"
    low, high = partitions[partition].raw, partitions[pool].raw
    if not _tier(low) < _tier(high):
        return f"partition {partition} has no lower PriorityTier than {pool}"
    for name, wanted in settings(partition).items():
        for key in ("PreemptMode", "OverSubscribe"):
            if partitions[name].raw.get(key) != wanted[key]:
                return f"partition {name} has not {key}={wanted[key]}"
    if not _tier(low) < _tier(partitions[held(partition)].raw):
        return f"partition {partition} has no lower PriorityTier than {held(partition)}"
    for name in (pool, held(partition)):
        if not set(partitions[partition].nodes) <= set(partitions[name].nodes):
            return f"partition {partition} has nodes that {name} has not"
    on = config.get("PreemptMode", "OFF").upper().split(",")[0] not in ("", "OFF")
    if not on or config.get("PreemptType") != "preempt/partition_prio":
        return "Slurm preempts no jobs by PriorityTier (PreemptType=preempt/partition_prio)"
    for key, exempt in _EXEMPT.items():
        if exempt(config.get(key, "")):
            return f"Slurm exempts jobs from being preempted: {key}={config[key]}"
    return ""


def _tier(raw: Mapping[str, str]) -> int:
    text = raw.get("PriorityTier", "")
    return int(text) if text.isdecimal() else 1


class Alike(NamedTuple):
    """Nodes of the same number of processors, and the MB of memory that each of them has."""

    nodes: Sequence[SlurmNode]
    cpus: int
    memory: int


def alike(nodes: Iterable[SlurmNode]) -> Alike:
    """Return the nodes with the most common number of processors; on a tie, the larger number.

    A lease requests all processors of its node before it knows which node it will get.
    """
    usable = [node for node in nodes if node.usable]
    counts = Counter(map(_cpus, usable))
    cpus = max(counts, key=lambda size: (counts[size], size), default=1)
    same = [node for node in usable if _cpus(node) == cpus]
    memory = [_number(n, "RealMemory") - _number(n, "MemSpecLimit") for n in same]
    return Alike(same, cpus, max(0, min(memory, default=0)))


def _cpus(node: SlurmNode) -> int:
    """Processors for jobs: without those that CoreSpecCount reserves."""
    return _number(node, "CPUEfctv") or node.cpus


def _number(node: SlurmNode, key: str) -> int:
    text = node.raw.get(key, "")
    return int(text) if text.isdecimal() else 0
