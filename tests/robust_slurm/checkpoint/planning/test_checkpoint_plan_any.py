"""Laws of any plan and any flush, whatever the places of a job hold."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.checkpoint.planning.flush import flush
from robust_slurm.checkpoint.planning.plan import Holder, Seat, plan
from robust_slurm.checkpoint.store.events import Holding

copies = st.builds(
    Holding,
    owner=st.integers(-1, 4),
    step=st.integers(-1, 4),
    world=st.sampled_from([3, 3, 3, 4]),
    needs=st.lists(st.integers(-1, 3), max_size=3).map(tuple) | st.just(()),
    tier=st.sampled_from(["memory", "replica", "x"]),
    file=st.sampled_from(["own-0-1", "replica-1-0", "f"]),
    size=st.integers(0, 10),
    ok=st.sampled_from([True, True, True, False]),
    why=st.sampled_from(["", "torn"]),
    epoch=st.integers(1, 2),
    same=st.just(-1),  # else numbers are drawn for these as well: ranks that began anew, or differ
    line=st.just(0),
)


worlds = st.lists(st.lists(copies, max_size=12), max_size=4).map(
    lambda stores: [
        Holder(f"s{i}", f"n{i // 2}", f"h{i}", i + 1, found) for i, found in enumerate(stores)
    ]
)


def good(copy: Holding) -> bool:
    return (
        copy.ok
        and copy.world == 3
        and 0 <= copy.owner < 3
        and copy.step >= 0
        and copy.tier != "x"
        and all(0 <= n < 3 for n in copy.needs)
    )


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(worlds, st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sets(st.integers(1, 5)))
def test_every_plan_can_be_carried_out(
    places: list[Holder], where: list[int], durable: set[int]
) -> None:
    seats = {rank: Seat(f"s{at}", f"n{at // 2}") for rank, at in enumerate(where)}
    resume = plan(places, seats, 3, [(step, 3) for step in durable])
    fine = [(p, h) for p in places for h in p.holdings if good(h)]
    complete = [
        (step, epoch)
        for step in range(5)
        for epoch in (1, 2)
        if {h.owner for _, h in fine if (h.step, h.epoch) == (step, epoch)} == {0, 1, 2}
    ]
    best = max(complete, default=None)
    if best is None or max(durable, default=0) > best[0]:
        assert (resume.step, resume.tier) == ((max(durable), "shared") if durable else (0, ""))
        return
    assert (resume.step, resume.tier) == (best[0], "memory")
    usable = {(p.store, h.owner): (p, h) for p, h in fine if (h.step, h.epoch) == best}
    for transfer in resume.transfers:
        place, _ = usable[transfer.source, transfer.owner]
        if transfer.host:
            assert (transfer.host, transfer.port) == (place.host, place.port)
            assert transfer.target in {s.store for s in seats.values() if s.node == transfer.node}
            assert place.node != transfer.node
        else:
            assert transfer.source == transfer.target and place.node == transfer.node
    keys = [(t.node, t.owner) for t in resume.transfers]
    assert len(keys) == len(set(keys))
    for node, there in resume.files.items():
        for owner, file in there.items():
            assert (node, owner) not in keys
            assert any(
                p.node == node and (h.owner, h.step, h.file) == (owner, best[0], file)
                and h.tier in ("memory", "replica")
                for p, h in fine
            )  # fmt: skip
    for rank, seat in seats.items():
        assert rank in resume.shards(seat.node)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(worlds)
def test_every_flush_writes_each_rank_once_or_nothing(places: list[Holder]) -> None:
    result = flush(places, 3)
    assert [w.owner for w in result.writes] in ([], [0, 1, 2])
    for write in result.writes:
        (place,) = [p for p in places if p.store == write.store]
        assert any(
            good(h) and (h.owner, h.step, h.file) == (write.owner, result.step, write.file)
            for h in place.holdings
        )
    assert (result.committer in {w.store for w in result.writes}) == bool(result.writes)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.data())
def test_a_lost_node_never_costs_a_step_that_its_replicas_have(
    nodes: int, per_node: int, data: st.DataObject
) -> None:
    nodes += 1
    world = nodes * per_node
    everything = [
        Holder(f"s{r}", f"n{r // per_node}", f"h{r}", 1, [
            Holding(r, 5, world, (r,), "memory", f"own-{r}-0", 1, True, ""),
            Holding((r - per_node) % world, 5, world, ((r - per_node) % world,), "replica",
                    f"replica-{(r - per_node) % world}-0", 1, True, ""),
        ])
        for r in range(world)
    ]  # fmt: skip
    lost = data.draw(st.integers(0, nodes - 1))
    seats = {
        r: Seat(f"x{r}", "spare") if r // per_node == lost else Seat(f"s{r}", f"n{r // per_node}")
        for r in range(world)
    }
    resume = plan([p for p in everything if p.node != f"n{lost}"], seats, world)
    assert resume.step == 5
    assert {t.node for t in resume.transfers} == {"spare"}
    assert len(resume.transfers) == per_node
    shards = chain.from_iterable(resume.shards(n) for n in {s.node for s in seats.values()})
    assert sorted(shards) == list(range(world))
