"""The bytes that a restore moves between nodes: at most 1.5 times the state of the ranks there."""

from __future__ import annotations

from collections import Counter

import pytest

from robust_slurm.checkpoint.capture.sharing import Share
from robust_slurm.checkpoint.planning.placement import place
from robust_slurm.checkpoint.planning.plan import Holder, Seat, plan
from robust_slurm.checkpoint.store.events import Holding
from robust_slurm.checkpoint.training.mesh import peers

STATE, PRIVATE = 64_000_000, 20_000  # bytes that a rank trains; its generators, loader and values


@pytest.mark.parametrize(
    ("mesh", "along", "per_node"),
    [
        ({"dp": 2}, "dp", 1),
        ({"dp": 8}, "dp", 1),
        ({"dp": 16}, "dp", 4),
        ({"dp": 200}, "dp", 4),  # more ranks than keepers
        ({"dp_shard": 4}, "", 1),  # FSDP2
        ({"dp_replicate": 2, "dp_shard": 4}, "dp_replicate", 4),  # HSDP
        ({"dp_replicate": 4, "dp_shard": 2}, "dp_replicate", 1),
        ({"pp": 2, "dp": 4}, "dp", 1),
        ({"dp": 4, "pp": 2}, "dp", 2),
    ],
)
def test_a_lost_node_costs_no_node_more_than_its_own_state(
    mesh: dict[str, int], along: str, per_node: int
) -> None:
    world = 1
    for size in mesh.values():
        world *= size
    node = [f"n{rank // per_node}" for rank in range(world)]
    holders = place(node, mesh)
    held: dict[int, list[Holding]] = {rank: [] for rank in range(world)}
    for rank in range(world):
        share = Share(peers(mesh, rank, along)) if along else None
        needs = share.needs(rank) if share else (rank,)
        part = STATE // len(share.holders) if share else STATE
        size = PRIVATE + (part if share is None or rank in share.holders else 0)
        holder = holders[rank]
        assert holder is not None
        for at, tier in ((rank, "memory"), (holder, "replica")):
            name = f"{'own' if tier == 'memory' else tier}-{rank}-0.safetensors"
            held[at].append(Holding(rank, 7, world, needs, tier, name, size, True, "", 1))
    for lost in {node[0], node[-1]}:
        places = [
            Holder(f"s{r}", node[r], node[r], 1, held[r]) for r in range(world) if node[r] != lost
        ]
        now = ["spare" if at == lost else at for at in node]
        seats = {r: Seat(f"spare{r}" if at == "spare" else f"s{r}", at) for r, at in enumerate(now)}
        resume = plan(places, seats, world)
        assert (resume.step, resume.tier) == (7, "memory")
        received: Counter[str] = Counter()
        for transfer in resume.transfers:
            received[transfer.node] += transfer.size
        assert received["spare"] > 0
        for at, count in Counter(now).items():
            assert received[at] <= 1.5 * STATE * count, (at, received[at])
