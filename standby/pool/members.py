"""The nodes of the pool: which may join, which stay, which are on the way. Pure.

A node joins if it has passed the node gate's checks within the last hours; only the gate, as root,
writes those records. A member stays until the pool is larger than wanted: a drained one keeps its
place and is counted as missing, since it comes back by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from health.gate.proof import Proof
from robust_slurm.slurm import JobPlacement, Partition, SlurmNode
from robust_slurm.text import ago
from standby.leases import held, held_nodes

Refill = Literal["train", "pool"]
HOUR = 3600.0
SKEW_S = 300.0  # by how much a node's clock may be ahead of ours


class Wish(msgspec.Struct, frozen=True):
    """The admin's wishes. Empty names: none.

    ``nodes`` may join, in this order, until ``size`` of them are free; ``source`` is the partition
    that they are taken from and given back to; ``backfill`` one over the same nodes whose jobs
    are preempted when a training needs a node; ``lease`` another, for leases. ``refill`` "pool":
    nodes of ``source`` that come back repaired may join too. ``proof_hours``: the maximum age of a
    node's last passed check when it joins; 0: any.
    ``burn_in_hours``: the same of its last passed burn-in.
    """

    partition: str
    nodes: tuple[str, ...]
    size: int
    source: str = ""
    backfill: str = ""
    refill: Refill = "train"
    proof_hours: float = 24.0
    burn_in_hours: float = 0.0
    qos: str = ""
    lease: str = ""


class Use(NamedTuple):
    """The jobs on a node: standby allocations, low-priority ones, any others, leases."""

    standby: tuple[int, ...] = ()
    lent: tuple[int, ...] = ()
    other: tuple[int, ...] = ()
    leased: tuple[int, ...] = ()


class Sight(NamedTuple):
    """The state that Slurm and the ledger show. ``unread``: why there are no proofs, or ""."""

    nodes: Mapping[str, SlurmNode]
    partitions: Mapping[str, Partition]
    jobs: Mapping[int, JobPlacement]
    proofs: Mapping[str, Proof]
    now: float
    unread: str = ""

    def nodes_of(self, partition: str) -> tuple[str, ...]:
        found = self.partitions.get(partition)
        return found.nodes if found else ()


class Admission(msgspec.Struct, frozen=True):
    """A node that was admitted. ``returned``: as one that came back repaired, not by its name."""

    since: float
    returned: bool = False


class Choice(NamedTuple):
    """``claims`` leave the source now and join when their jobs are over."""

    members: tuple[str, ...]
    claims: tuple[str, ...]
    refused: Mapping[str, str]  # node -> why it was not admitted


def uses(wish: Wish, jobs: Mapping[int, JobPlacement]) -> dict[str, Use]:
    """The jobs on each node that has any."""
    found: dict[str, Use] = {}
    kept = held_nodes(wish.lease, jobs.values()) if wish.lease else frozenset()
    for number, job in sorted(jobs.items()):
        for name in job.nodes:
            use = found.get(name, Use())
            lease = bool(wish.lease) and job.partition == wish.lease
            if lease and name not in kept:
                use = use._replace(leased=(*use.leased, number))
            elif lease or job.partition == wish.partition:
                use = use._replace(standby=(*use.standby, number))
            elif name in kept and job.partition == held(wish.lease):
                pass  # it only keeps the node for the lease
            elif wish.backfill and job.partition == wish.backfill:
                use = use._replace(lent=(*use.lent, number))
            else:
                use = use._replace(other=(*use.other, number))
            found[name] = use
    return found


def why_not(name: str, wish: Wish, sight: Sight) -> str:
    """Return the reason why a node may not join; "" if it may."""
    node = sight.nodes.get(name)
    if node is None:
        return "Slurm does not know this node"
    if not node.usable:
        reason = f", {node.reason}" if node.reason else ""
        return f"{'+'.join(sorted(node.state))}{reason}"
    if sight.unread and (wish.proof_hours or wish.burn_in_hours):
        return f"its checks cannot be read: {sight.unread}"
    proof = sight.proofs.get(name, Proof())
    return _unproven(wish, proof, sight.now) or _unburned(name, wish, proof, sight.now)


def _unproven(wish: Wish, proof: Proof, now: float) -> str:
    if not wish.proof_hours:
        return ""
    if proof.failed > proof.passed:
        return f"its last check failed {ago(proof.failed, now)}: {proof.why}"
    if not proof.passed:
        return "no check is on record; see robust-admin doctor"
    age = now - proof.passed
    if age > wish.proof_hours * HOUR:
        return f"last check passed {ago(proof.passed, now)}; --proof-hours is {wish.proof_hours:g}"
    if age < -SKEW_S:
        return f"its last check is {-age:.0f} s in the future: its clock or this node's is wrong"
    return ""


def _unburned(name: str, wish: Wish, proof: Proof, now: float) -> str:
    if not wish.burn_in_hours:
        return ""
    if not proof.burned:
        return f"no passed burn-in is on record; run robust-health burn-in {name}"
    if now - proof.burned > wish.burn_in_hours * HOUR:
        return f"last burn-in {ago(proof.burned, now)}; --burn-in-hours is {wish.burn_in_hours:g}"
    return ""


def refill(wish: Wish, proof: Proof, now: float) -> Refill:
    """Return where a node of the source goes once the gate has undrained it."""
    fresh = 0 <= now - proof.undrained <= wish.proof_hours * HOUR
    return "pool" if wish.refill == "pool" and fresh else "train"


def choose(
    wish: Wish, sight: Sight, admitted: Mapping[str, Admission], taken: Sequence[str] = ()
) -> Choice:
    """Return the pool as it should be now; ``taken``: nodes that already left the source for it.

    Nodes in use do not count: ``size`` nodes are to be free besides them. Members come first
    (nothing moves without need), then idle nodes, then busy ones.
    """
    use = uses(wish, sight.jobs)
    returned = [
        name
        for name in (*sight.nodes_of(wish.source), *taken)
        if name not in wish.nodes
        and refill(wish, sight.proofs.get(name, Proof()), sight.now) == "pool"
    ]
    returned += [name for name, m in admitted.items() if m.returned and name not in wish.nodes]
    candidates = dict.fromkeys((*wish.nodes, *returned))
    old = [name for name in candidates if name in admitted and name in sight.nodes]
    away = [name for name in old if wish.size and not sight.nodes[name].usable]
    stay = [name for name in old if name in away or use.get(name, Use()).standby]
    ready = [name for name in old if name not in stay]
    # A member that --nodes no longer names leaves when its job is over.
    stay += [
        name
        for name in admitted
        if name not in candidates and use.get(name, Use()).standby and name in sight.nodes
    ]
    refused: dict[str, str] = {}
    new: list[str] = []
    for name in candidates:
        if name in old:
            continue
        why = why_not(name, wish, sight)
        if not why:
            new.append(name)
        elif name in wish.nodes:
            refused[name] = why
    # A node with a standby allocation is proven and in use: it takes no place of a free node.
    held = [name for name in new if use.get(name, Use()).standby]
    idle = [name for name in new if name not in held and not use.get(name, Use()).other]
    busy = [name for name in new if name not in held and name not in idle]
    lacking = max(0, wish.size - len(ready))
    joining = idle[:lacking]
    claims = busy[: lacking - len(joining)]
    members = set(stay) | set(ready[: wish.size]) | set(held) | set(joining)
    order = [name for name in dict.fromkeys((*candidates, *stay)) if name in members]
    return Choice(tuple(order), tuple(claims), refused)


def demote(choice: Choice, wish: Wish, sight: Sight, admitted: Mapping[str, Admission]) -> Choice:
    """Return the choice without new nodes on which a job has started meanwhile: they join later.

    In the pool's partition a standby allocation could end that job.
    """
    use = uses(wish, sight.jobs)
    late = {n for n in choice.members if n not in admitted and use.get(n, Use()).other}
    kept = tuple(name for name in choice.members if name not in late)
    return Choice(kept, (*choice.claims, *sorted(late)), choice.refused)


def shared(
    wish: Wish, members: Iterable[str], partitions: Mapping[str, Partition]
) -> dict[str, tuple[str, ...]]:
    """Other partitions whose jobs can take nodes of the pool, and which nodes."""
    pool = set(members)
    ours = {wish.partition, wish.backfill, wish.lease, held(wish.lease)}
    found = {
        name: tuple(node for node in partition.nodes if node in pool)
        for name, partition in partitions.items()
        if name not in ours and partition.state == "UP"
    }
    return {name: nodes for name, nodes in found.items() if nodes}
