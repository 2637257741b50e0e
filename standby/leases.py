"""Leases: idle standby nodes that wait warm for a job until another job needs them. Pure.

A lease is a job in a partition over the pool's nodes whose jobs Slurm ends as soon as somebody
asks the pool for their node. One that has ranks must stay: then a second job of the same user, in
the partition ``held(…)`` over the same nodes, shares the node's processors with it. That one is
never preempted, so the node is nobody else's. (A running job cannot change its partition.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from robust_slurm.slurm import JobPlacement, Node, Partition, StandbyClaim

LEASE_TIER, HELD_TIER = 0, 1  # PriorityTier; the pool's is higher than both
SHARED = "FORCE:1"  # OverSubscribe: the two jobs of a node share its processors
_EXEMPT: Mapping[str, Callable[[str], bool]] = {
    "PreemptMode": lambda text: "PRIORITY" in text.upper().split(","),
    "PreemptExemptTime": lambda text: text not in ("", "(null)", "NONE", "00:00:00"),
    "PreemptParameters": lambda text: "min_exempt_priority" in text,
}
"""Settings of slurm.conf by which a job may be spared in spite of its partition."""


class LeaseWish(NamedTuple):
    """A running job that has a lease, or waits for one. ``size``: nodes of the training."""

    job: int
    size: int


def held(partition: str) -> str:
    """The partition of the jobs that hold the nodes of leases with ranks."""
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
    """Every running job that has or awaits a lease, with the size that Slurm knows it has.

    A claim counts for a job of the same user only.
    """
    found = {own.job: own}
    for claim in claims:
        of = jobs.get(claim.of)
        if of is not None and of.user == claim.user:
            found.setdefault(claim.of, LeaseWish(claim.of, len(of.nodes)))
    return list(found.values())


def entitled(found: Iterable[LeaseWish], nodes: int) -> frozenset[int]:
    """The jobs that may have a lease while there are so many nodes for leases.

    One each, the largest jobs first: a fault stops all nodes of a job for the time that a lease
    saves, and the more nodes it has, the sooner one fails. Of two of a size, the older one.
    """
    order = sorted(found, key=lambda wish: (-wish.size, wish.job))
    return frozenset(wish.job for wish in order[:nodes])


def leasable(nodes: Iterable[Node], leased: Iterable[str], taken: Iterable[str]) -> int:
    """Number of nodes that leases can share: idle ones, and ``leased`` ones without ranks.

    Not one that is drained: Slurm gives it to nobody when it is given back.
    """
    kept = set(leased) - set(taken)
    return sum(node.idle or (node.usable and node.name in kept) for node in nodes)


def obstacle(
    partition: str, pool: str, partitions: Mapping[str, Partition], config: Mapping[str, str]
) -> str:
    """Return why a lease in this partition would keep the node from others; "" if none would.

    A partition of that name may be somebody else's: it must be as ``settings`` makes it.
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

    nodes: Sequence[Node]
    cpus: int
    memory: int


def alike(nodes: Iterable[Node]) -> Alike:
    """Return the nodes of the size that most have, of two sizes the larger.

    A lease has all processors of its node, and asks for them before it knows which node that is.
    """
    usable = [node for node in nodes if node.usable]
    counts = Counter(map(_cpus, usable))
    cpus = max(counts, key=lambda size: (counts[size], size), default=1)
    same = [node for node in usable if _cpus(node) == cpus]
    memory = [_number(n, "RealMemory") - _number(n, "MemSpecLimit") for n in same]
    return Alike(same, cpus, max(0, min(memory, default=0)))


def _cpus(node: Node) -> int:
    """Processors for jobs: without those that CoreSpecCount reserves."""
    return _number(node, "CPUEfctv") or node.cpus


def _number(node: Node, key: str) -> int:
    text = node.raw.get(key, "")
    return int(text) if text.isdecimal() else 0
