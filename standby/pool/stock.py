"""The standby pool in one line: what robust-standby recorded, and how it stands in Slurm now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robust_slurm.slurm import JobPlacement, SlurmNode
from robust_slurm.state_dir.files import read_capped
from robust_slurm.state_dir.records import clean, decode, number, whole
from robust_slurm.text import span
from standby.leases import held_nodes

POOL_BYTES = 8 << 20
_FILE = ("standby", "pool.json")


@dataclass(frozen=True)
class Pool:
    """The applied pool. Times are seconds since 1970, 0.0: never."""

    partition: str
    backfill: str
    lease: str
    wanted: int
    short_since: float
    checked: Mapping[str, float]  # node -> when it was last seen well, as of the last apply


@dataclass(frozen=True)
class PoolStock:
    """The pool now.

    ``free`` nodes are available at once: idle, or ``lent`` or ``leased`` to preemptible jobs.
    """

    partition: str
    wanted: int
    free: int
    lent: int
    in_use: int
    out: int
    short: int
    short_s: float | None  # since an apply noticed; None: nothing is short, or none has noticed
    oldest_check_s: float | None  # of the free nodes; None: not known
    leased: int = 0


def read_pool(state_dir: Path) -> tuple[Pool | None, str]:
    """Return the recorded pool, None if none is; and what is wrong with the file."""
    path = state_dir.joinpath(*_FILE)
    try:
        found = pool_from(decode(read_capped(path, POOL_BYTES)))
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except OSError as error:
        return None, f"cannot read {path}: {clean(error.strerror or str(error))}"
    return found, "" if found else f"{path} is not a record of a pool; skipped"


def pool_from(data: object) -> Pool | None:
    wish: Any = data.get("wish") if isinstance(data, dict) else None
    if not isinstance(data, dict) or not isinstance(wish, dict):
        return None
    partition, wanted = clean(wish.get("partition"), 64), whole(wish.get("size"))
    if not partition or wanted is None or wanted < 0:
        return None
    checked = data.get("checked")
    pairs = checked.items() if isinstance(checked, dict) else ()
    times = {clean(name, 255): number(when) for name, when in pairs}
    return Pool(
        partition,
        clean(wish.get("backfill"), 64),
        clean(wish.get("lease"), 64),
        wanted,
        number(data.get("short_since")) or 0.0,
        {name: when for name, when in times.items() if when is not None},
    )


def stock(
    pool: Pool, nodes: Mapping[str, SlurmNode], jobs: Mapping[int, JobPlacement], now: float
) -> PoolStock:
    """Return the state of the pool: its members are the nodes of its partition. Pure."""
    by_partition: dict[str, set[str]] = {}
    for job in jobs.values():
        by_partition.setdefault(job.partition, set()).update(job.nodes)
    used = by_partition.pop(pool.partition, set())
    used |= held_nodes(pool.lease, jobs.values()) if pool.lease else set()
    leases = by_partition.pop(pool.lease, set()) - used
    low = by_partition.pop(pool.backfill, set())
    others = set().union(*by_partition.values()) - used
    members = [node for node in nodes.values() if pool.partition in node.partitions]
    in_use = [node for node in members if node.name in used]
    rest = [node for node in members if node.name not in used]
    free = [node for node in rest if node.usable and node.name not in others]
    short = max(0, pool.wanted - len(free))
    ages = [now - pool.checked[node.name] for node in free if node.name in pool.checked]
    return PoolStock(
        pool.partition,
        pool.wanted,
        len(free),
        sum(node.name in low for node in free),
        len(in_use),
        len(rest) - len(free),
        short,
        max(0.0, now - pool.short_since) if short and pool.short_since else None,
        max(0.0, *ages) if ages else None,
        sum(node.name in leases for node in free),
    )


def told(stock: PoolStock) -> str:
    """Like "pool standby: 3 of 4 nodes free, 1 in use; short 1 for 12 min; oldest check 2 h"."""
    away = [(stock.lent, "lent"), (stock.leased, "leased")]
    those = ", ".join(f"{count} {what}" for count, what in away if count)
    text = f"pool {stock.partition}: {stock.free} of {stock.wanted} nodes free"
    text += f" ({those})" if those else ""
    for count, what in ((stock.in_use, "in use"), (stock.out, "out of service")):
        if count:
            text += f", {count} {what}"
    if stock.short:
        text += f"; short {stock.short}"
    if stock.short_s is not None:
        text += f" for {span(stock.short_s)}"
    if stock.oldest_check_s is not None:
        text += f"; oldest check {span(stock.oldest_check_s)} ago"
    return text
