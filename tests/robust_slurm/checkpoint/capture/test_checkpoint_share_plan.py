"""Plain data parallelism: entries and transfers of a restore from the parts that ranks keep."""

from __future__ import annotations

from collections import Counter

import pytest
from plan_places import held

from robust_slurm.checkpoint.capture.sharing import HOLDERS, Share
from robust_slurm.checkpoint.planning.placement import place
from robust_slurm.checkpoint.planning.plan import Holder, Seat, plan
from robust_slurm.checkpoint.store.events import Holding


@pytest.mark.parametrize("ranks", [16, 128, 1000])
def test_plain_data_parallel_ranks_lose_a_node(ranks: int) -> None:
    """Eight ranks a node, which all hold the same. Entries grow with the ranks, not with their
    square, and no node gets or gives much more than the state once."""
    share = Share(tuple(range(ranks)))
    node = [f"n{rank // 8}" for rank in range(ranks)]
    parts, nodes = len(share.holders), ranks // 8
    holders = place(node, {"dp": ranks})
    here: dict[str, list[Holding]] = {name: [] for name in node}
    for rank, holder in enumerate(holders):
        assert holder is not None and node[holder] != node[rank]
        for at, tier in ((rank, "memory"), (holder, "replica")):
            found = held(rank, 8, tier, world=ranks, needs=share.needs(rank), same=7)
            here[node[at]].append(found)
    entries = sum(len(each.needs) for found in here.values() for each in found)
    assert entries <= 2 * ranks * (HOLDERS + 1)
    seats = {rank: Seat(name, name) for rank, name in enumerate(node)}
    seats |= {rank: Seat("new", "new") for rank in range(8)}
    places = [Holder(n, n, n, 1, tuple(found)) for n, found in here.items() if n != "n0"]
    resume = plan(places, seats, ranks)
    assert (resume.step, resume.tier) == (8, "memory")
    got = Counter(each.target for each in resume.transfers)
    assert got["new"] <= parts + 8 and max(got.values()) == got["new"]
    sent = Counter(each.source for each in resume.transfers)
    # Twice as much from the node that has the replicas of the lost one's parts.
    assert max(sent.values()) <= 2 * -(-parts // nodes) * nodes + 8
    for name in set(node[8:]) | {"new"}:
        assert set(share.holders) <= set(resume.shards(name))
