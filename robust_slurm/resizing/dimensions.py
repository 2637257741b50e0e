"""Meanings of the names of a mesh's dimensions. Pure.

All programs read them here, by one of three rules: exact names (checkpoints, worlds of other
sizes), beginnings of names in any case (placement of nodes, replay), and those of a plan of
``robust_slurm.data``. Standard library only, Python 3.9 syntax.
"""

from __future__ import annotations

SAME_TENSORS = ("dp_replicate", "dp")
"""Dimensions along which ranks are taken to hold the same plain tensors; of several in a mesh the
first of this order. Only names that mean nothing else: such ranks save a part each and are
compared, and one that differs may cost its node. ``ddp``, ``data`` and ``replicate`` do not count
here."""
COPIES = frozenset((*SAME_TENSORS, "replicate", "ddp", "data"))
"""Dimensions along which only copies of the model are."""
DATA = COPIES | frozenset(("dp_shard", "fsdp", "shard"))
"""Dimensions along which each rank computes a batch of its own, and may hold a part of it all."""
PIPELINE = frozenset(("pp", "pipeline", "pipe", "stage"))
"""Dimensions along which ranks hold different layers."""

GROUPS = {
    **dict.fromkeys(DATA, "data-parallel"),
    **dict.fromkeys(PIPELINE, "pipeline"),
    "tp": "tensor",
    "cp": "context",
    "sp": "sequence",
    "ep": "expert",
}
"""Usual name of the groups of ranks along a dimension."""


def placement_kind(name: str) -> str:
    """Return "pp", "tp" or "dp"; the last for every dimension over which gradients are reduced."""
    name = name.lower()
    if name in PIPELINE or name.startswith(("pp", "pipe")):
        return "pp"
    return "tp" if name.startswith(("tp", "tensor")) else "dp"


def replay_can_shrink(name: str) -> bool:
    """Return True for a dimension that a replay may make smaller: only copies of the model, or
    shards of its state, are along it. Context and expert parallelism (cp, ep) stay, as TP and PP
    do."""
    return name.lower().startswith(("dp", "data", "ddp", "fsdp", "replicate", "shard"))


def divides_data(name: str) -> bool:
    """Return True for a dimension along which a plan of ``robust_slurm.data`` gives ranks
    different rows: dp, dp_shard, dp_replicate. A plan that is in use must go on with its rows."""
    return name == "dp" or name.startswith("dp_")
