"""Snapshots that the places of a small job hold, for what is planned from them."""

from __future__ import annotations

from robust_slurm.checkpoint.planning.plan import Holder, Seat
from robust_slurm.checkpoint.store.events import Holding

MIB = 1 << 20


def held(owner: int, step: int, tier: str = "memory", **other: object) -> Holding:
    """A good snapshot of four ranks' run."""
    prefix = {"memory": "own", "replica": "replica"}[tier]
    holding = Holding(owner, step, 4, (owner,), tier, f"{prefix}-{owner}-{step}", MIB, True, "", 1)
    return holding._replace(**other)


def store(rank: int, *holdings: Holding, node: str = "") -> Holder:
    """A rank's own store; without ``node`` in its seat."""
    return Holder(f"t{rank}", node or f"n{rank // 2}", f"10.0.0.{rank}", 7000 + rank, holdings)


# Four ranks on two nodes; holders are 0 ↔ 2 and 1 ↔ 3.
SEATS = {rank: Seat(f"t{rank}", f"n{rank // 2}") for rank in range(4)}
HOLDER = {0: 2, 1: 3, 2: 0, 3: 1}


def healthy(*steps: int) -> list[Holder]:
    """Every rank's own snapshots and those it holds for another."""
    return [
        store(
            rank,
            *(held(rank, s) for s in steps),
            *(held(HOLDER[rank], s, "replica") for s in steps),
        )
        for rank in range(4)
    ]
