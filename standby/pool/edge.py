"""The pool's access to Slurm and the gate's ledger: read the state, give single orders."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from health.history.node_reports import main_job_of
from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.slurm.values import fold
from standby.leases import held
from standby.pool import file as pool_file
from standby.pool.file import PoolError, PoolRecord
from standby.pool.lines import has_accounting, named_in
from standby.pool.members import Sight, Wish, uses
from standby.pool.objects import NO_QOS, PartitionChange

SLURM_S = 20.0
_MOST_LOOKUPS = 64  # jobs; each look-up is one call of scontrol
_CONF_LIMIT = 8 << 20  # bytes
Confirm = Callable[[str], bool] | None  # None: do not ask


class WishError(ValueError):
    """A wish that cannot be met; the text says what to wish instead."""


class PoolView(NamedTuple):
    sight: Sight
    config: Mapping[str, str]


def observe(slurm: Slurm, wish: Wish, state_dir: str) -> PoolView:
    """Read everything that a plan depends on, as it is now. Raises SlurmError."""
    alive(slurm)
    config, nodes = slurm.config(), slurm.nodes()
    partitions, jobs = slurm.partitions(), slurm.placements()
    names = dict.fromkeys(wish.nodes)
    if wish.partition in partitions:
        names |= dict.fromkeys(partitions[wish.partition].nodes)
    if wish.refill == "pool" and wish.source in partitions:
        names |= dict.fromkeys(partitions[wish.source].nodes)
    known = [name for name in names if name in nodes]
    proofs, unread = pool_file.proofs(state_dir, known, wish.burn_in_hours > 0)
    return PoolView(Sight(nodes, partitions, jobs, proofs, time.time(), unread), config)


def alive(slurm: Slurm) -> None:
    """Raise SlurmError where no slurmctld answers, or Slurm's commands are not here."""
    if not slurm.ping():
        slurm.version()  # which needs no slurmctld
        raise SlurmError("unreachable", ("scontrol", "ping"), "no slurmctld answers")


def check(wish: Wish, seen: PoolView, old: PoolRecord | None) -> None:
    """Raise WishError if this Slurm cannot grant the wish, or it changes a partition of others."""
    if wish.source and wish.source not in seen.sight.partitions:
        there = ", ".join(seen.sight.partitions)
        raise WishError(f"--from {wish.source}: no such partition in Slurm; it has {there}")
    if wish.qos not in ("", NO_QOS) and not has_accounting(seen.config):
        raise WishError(
            f"--qos {wish.qos}: a QOS needs slurmdbd, but AccountingStorageType is "
            f"{seen.config.get('AccountingStorageType', 'not set')}; apply without --qos"
        )

    ours = {*old.done, *_partitions(old.wish)} if old is not None else set()
    for name, key in _partitions(wish).items():
        others = [node for node in seen.sight.nodes_of(name) if node not in wish.nodes]
        if others and name not in ours:
            raise WishError(
                f"--{key} {name}: this partition exists and would lose nodes that --nodes does not "
                f"name ({fold(others)}): name them too, or another --{key}"
            )


def _partitions(wish: Wish) -> dict[str, str]:
    """Return the partitions of the pool's own, each with the option that names it."""
    return {
        wish.partition: "partition",
        wish.backfill: "backfill",
        wish.lease: "lease",
        held(wish.lease): "lease",
    }


def give(slurm: Slurm, order: PartitionChange) -> None:
    """Give an order to Slurm. Raises SlurmError."""
    if order.action == "create":
        slurm.create_partition(order.partition, order.words())
    else:
        slurm.update_partition(order.partition, order.words())


def slurm_conf(config: Mapping[str, str]) -> str:
    """The text of the cluster's slurm.conf, if this machine has it; else ""."""
    try:
        with open(config.get("SLURM_CONF", ""), "rb") as file:
            return file.read(_CONF_LIMIT).decode("utf-8", "replace")
    except OSError:
        return ""


def not_permanent(now: PoolRecord, config: Mapping[str, str]) -> list[str]:
    """Return a note for each partition that apply created and a readable slurm.conf lacks."""
    text = slurm_conf(config)
    made = [name for name, one in now.done.items() if one.created]
    lacking = [name for name in made if text and named_in(text, name) is False]
    return [
        f"partition {name} is not in slurm.conf: the next reconfigure removes it (robust-standby "
        "apply prints its line)"
        for name in lacking
    ]


def trainings(slurm: Slurm, wish: Wish, sight: Sight) -> dict[int, int]:
    """Return for each job in the pool's partition the training that it was requested for."""
    found: dict[int, int] = {}
    numbers = sorted(
        {job for use in uses(wish, sight.jobs).values() for job in (*use.standby, *use.leased)}
    )
    for number in numbers[:_MOST_LOOKUPS]:
        try:
            found[number] = main_job_of(slurm.job(number).comment or "")
        except SlurmError as error:
            if error.transient:
                raise
    return found


def recorded(state_dir: str) -> PoolRecord:
    """Return the applied pool. Raises PoolError if nothing was applied."""
    found = pool_file.load(state_dir)
    if found is None:
        raise PoolError(
            f"no pool is recorded in {state_dir or 'the state directory'}: create one with "
            "robust-standby apply --nodes …"
        )
    return found
