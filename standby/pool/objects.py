"""Compute the changes of Slurm's partitions that make the wanted pool. Pure.

A change names only what it changes. ``AppliedChanges`` keeps, for each partition, what later runs
need: that apply created it, and which nodes it took out.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Literal, NamedTuple

from msgspec import Struct

from robust_slurm.slurm import Partition
from robust_slurm.slurm.values import fold
from standby import leases
from standby.pool.members import Choice, Wish

STANDBY_TIER = 100  # PriorityTier; Slurm's default is 1
BACKFILL_TIER = 1
NO_QOS = "none"


class PartitionChange(NamedTuple):
    """One order. ``nodes`` None: they stay as they are."""

    action: Literal["create", "update"]
    partition: str
    settings: Mapping[str, str] = {}
    nodes: tuple[str, ...] | None = None

    def words(self) -> dict[str, str]:
        """The settings as scontrol takes them, nodes included."""
        listed = {} if self.nodes is None else {"Nodes": fold(self.nodes)}
        return {**listed, **self.settings}

    def __str__(self) -> str:
        words = [f"{key}={value or '(none)'}" for key, value in self.words().items()]
        return " ".join([self.action, f"PartitionName={self.partition}", *words])


class AppliedChanges(Struct, frozen=True):
    """The changes that apply made to a partition; ``removed``: nodes that it took out."""

    created: bool = False
    removed: tuple[str, ...] = ()


class PoolTarget(NamedTuple):
    """A partition as it should be.

    ``initial``: settings given only when apply creates it; ``made``: apply may create it.

    ``gone``: names that belong there and that Slurm does not know.
    """

    nodes: tuple[str, ...]
    settings: Mapping[str, str] = {}
    initial: Mapping[str, str] = {}
    made: bool = True
    gone: tuple[str, ...] = ()


def known(names: Iterable[str], nodes: Container[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names that Slurm knows, and the others, which no order may contain.

    With a single unknown name, Slurm 22.05 leaves the partition without a usable node.
    """
    listed = tuple(dict.fromkeys(names))
    here = tuple(name for name in listed if name in nodes)
    return here, tuple(name for name in listed if name not in nodes)


def gone_notes(partition: str, names: Iterable[str]) -> list[str]:
    return [
        f"partition {partition}: Slurm does not know node {name}; it is left out" for name in names
    ]


def targets(
    wish: Wish,
    choice: Choice,
    partitions: Mapping[str, Partition],
    nodes: Container[str],
    done: Mapping[str, AppliedChanges],
    preempts: bool,
) -> dict[str, PoolTarget]:
    """Return the target of each partition of the wish, the source first. ``nodes``: Slurm's.

    ``preempts``: slurm.conf lets higher tiers take nodes from lower ones. Without it no
    low-priority partition is created: its jobs would block trainings. One that was created before
    is kept up to date.
    """
    found: dict[str, PoolTarget] = {}
    low = done.get(wish.backfill, AppliedChanges()).created and wish.backfill in partitions
    lends = bool(wish.backfill) and (preempts or low)
    held = {*choice.members, *choice.claims}
    if wish.source in partitions:
        now = partitions[wish.source].nodes
        back = [name for name in done.get(wish.source, AppliedChanges()).removed if name not in now]
        rest, gone = known((name for name in (*now, *back) if name not in held), nodes)
        found[wish.source] = PoolTarget(rest, made=False, gone=gone)
    settings: dict[str, str] = {}
    leased = done.get(wish.lease, AppliedChanges()).created and wish.lease in partitions
    leases_out = bool(wish.lease) and (preempts or leased)
    if wish.qos:
        settings["QoS"] = "" if wish.qos == NO_QOS else wish.qos
    if lends or leases_out:
        present = partitions.get(wish.partition)
        tier = _tier(present)
        settings["PriorityTier"] = str(tier if tier > BACKFILL_TIER else STANDBY_TIER)
        settings["PreemptMode"] = "OFF"
    up = {"State": "UP", "MaxTime": "INFINITE"}
    members, gone = known(choice.members, nodes)
    found[wish.partition] = PoolTarget(members, settings, up, gone=gone)
    if lends:
        settings = {"PriorityTier": str(BACKFILL_TIER), "PreemptMode": "REQUEUE"}
        found[wish.backfill] = PoolTarget(members, settings, up)
    if leases_out:
        for name, settings in leases.settings(wish.lease).items():
            found[name] = PoolTarget(members, settings, up)
    return found


def _tier(partition: Partition | None) -> int:
    text = partition.raw.get("PriorityTier", "") if partition else ""
    return int(text) if text.isdecimal() else 0


def changes(
    wanted: Mapping[str, PoolTarget], partitions: Mapping[str, Partition]
) -> list[PartitionChange]:
    """Return the changes. A node leaves a partition before it joins another: never in both."""
    first: list[PartitionChange] = []
    last: list[PartitionChange] = []
    for name, target in wanted.items():
        present = partitions.get(name)
        if present is None:
            if target.made:
                settings = {**target.settings, **target.initial}
                last.append(PartitionChange("create", name, settings, target.nodes))
            continue
        wished = target.settings.items()
        settings = {k: v for k, v in wished if setting(present, k).lower() != v.lower()}
        kept = tuple(node for node in present.nodes if node in target.nodes)
        if len(kept) < len(present.nodes):
            first.append(PartitionChange("update", name, settings, kept))
            settings = {}
        if set(kept) != set(target.nodes):
            last.append(PartitionChange("update", name, settings, target.nodes))
        elif settings:
            last.append(PartitionChange("update", name, settings))
    return [*first, *last]


def takes(order: PartitionChange, wish: Wish, partitions: Mapping[str, Partition]) -> bool:
    """Return whether the order takes nodes out of the source."""
    present = partitions.get(order.partition)
    if order.partition != wish.source or order.nodes is None or present is None:
        return False
    return not set(present.nodes) <= set(order.nodes)


def setting(partition: Partition, key: str) -> str:
    """Return a setting as Slurm prints it; "" where Slurm prints that there is none."""
    text = partition.raw.get(key, "")
    return "" if text in ("N/A", "NONE", "(null)") else text


def record(
    done: Mapping[str, AppliedChanges], change: PartitionChange, present: Partition | None
) -> dict[str, AppliedChanges]:
    """Add a change to those done; ``present`` is the partition just before it."""
    before = done.get(change.partition, AppliedChanges())
    if present is None:
        return {**done, change.partition: AppliedChanges(True, before.removed)}
    removed = set(before.removed)
    if change.nodes is not None:
        removed = (removed | set(present.nodes)) - set(change.nodes)
    return {**done, change.partition: AppliedChanges(before.created, tuple(sorted(removed)))}
