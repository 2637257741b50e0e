"""What to resume from, and what to write before the job ends."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.checkpoint.events import Holding
from robust_slurm.checkpoint.flush import flush
from robust_slurm.checkpoint.plan import Place, Resume, Seat, numbers, plan

MIB = 1 << 20


def held(owner: int, step: int, tier: str = "memory", **other: object) -> Holding:
    prefix = {"memory": "own", "replica": "replica", "local": "/local/own"}[tier]
    holding = Holding(owner, step, 4, (owner,), tier, f"{prefix}-{owner}-{step}", MIB, True, "", 1)
    return holding._replace(**other)


def store(rank: int, *holdings: Holding, node: str = "") -> Place:
    return Place(f"t{rank}", node or f"n{rank // 2}", f"10.0.0.{rank}", 7000 + rank, holdings)


# Four ranks on two nodes; holders are 0 ↔ 2 and 1 ↔ 3.
SEATS = {rank: Seat(f"t{rank}", f"n{rank // 2}") for rank in range(4)}
HOLDER = {0: 2, 1: 3, 2: 0, 3: 1}


def healthy(*steps: int) -> list[Place]:
    """Every rank's own snapshots and those it holds for another."""
    return [
        store(
            rank,
            *(held(rank, s) for s in steps),
            *(held(HOLDER[rank], s, "replica") for s in steps),
        )
        for rank in range(4)
    ]


def change(
    places: list[Place], rank: int, step: int, tier: str = "memory", /, **other
) -> list[Place]:
    """The same with one copy changed."""
    return [
        p._replace(
            holdings=[
                h._replace(**other) if (h.owner, h.step, h.tier) == (rank, step, tier) else h
                for h in p.holdings
            ]
        )
        for p in places
    ]


def text(resume: Resume) -> str:
    return "\n".join(resume.lines)


def test_after_the_death_of_a_process_nothing_is_transferred() -> None:
    resume = plan(healthy(7, 8), SEATS, 4)
    assert (resume.step, resume.tier, resume.transfers, resume.passed) == (8, "memory", (), ())
    assert resume.shards("n0") == {0: "own-0-8", 1: "own-1-8"}
    assert resume.shards("n1") == {2: "own-2-8", 3: "own-3-8"}
    assert "resumed step 8 from memory: 4 of 4 snapshots" in text(resume)


def test_a_lost_node_is_replaced_from_its_replicas() -> None:
    places = [p for p in healthy(7, 8) if p.node == "n1"]
    seats = {**SEATS, 0: Seat("t8", "n4"), 1: Seat("t9", "n4")}
    resume = plan(places, seats, 4)
    assert resume.step == 8
    assert [(t.owner, t.source, t.host, t.port, t.target, t.node) for t in resume.transfers] == [
        (0, "t2", "10.0.0.2", 7002, "t8", "n4"),
        (1, "t3", "10.0.0.3", 7003, "t9", "n4"),
    ]
    assert resume.shards("n4") == {
        0: "fetched-0-8.safetensors",
        1: "fetched-1-8.safetensors",
    }
    assert "rank 0: t2 → t8 on n4 (replica)" in text(resume)
    assert "2 of 4 snapshots were where they are needed, 2 from peers (2 MiB)" in text(resume)


def test_a_replica_on_the_node_that_takes_over_is_used_by_path() -> None:
    places = [p for p in healthy(8) if p.node == "n1"]
    companion = {rank: Seat(f"t{2 + rank % 2}", "n1") for rank in range(4)}
    resume = plan(places, companion, 4)
    assert resume.transfers == ()
    assert resume.files == {"n1": {0: "replica-0-8", 1: "replica-1-8", 2: "own-2-8", 3: "own-3-8"}}


def test_a_step_that_one_rank_lacks_is_passed_over() -> None:
    places = healthy(7, 8)
    for tier in ("memory", "replica"):
        places = change(places, 3, 8, tier, ok=False, why="torn: it was being written")
    resume = plan(places, SEATS, 4)
    assert resume.step == 7
    assert "step 8 is incomplete: nothing usable of rank 3" in text(resume)
    assert text(resume).count("passed over: rank 3 step 8 on") == 2
    whys = Counter((p.owner, p.why) for p in resume.passed)
    assert whys[3, "torn: it was being written"] == 2
    assert {(o, w) for o, w in whys if o != 3} == {(r, "its step is incomplete") for r in range(3)}


def test_a_corrupt_copy_is_replaced_by_its_replica() -> None:
    resume = plan(change(healthy(8), 1, 8, ok=False, why="chunk 3 differs"), SEATS, 4)
    assert resume.step == 8
    assert [(t.owner, t.source, t.target) for t in resume.transfers] == [(1, "t3", "t1")]
    assert [(p.owner, p.file, p.why) for p in resume.passed] == [(1, "own-1-8", "chunk 3 differs")]
    assert "passed over: rank 1 step 8 on n0: chunk 3 differs" in text(resume)


def test_a_source_that_failed_is_not_asked_again() -> None:
    places = change(healthy(7, 8), 1, 8, ok=False, why="differs")
    resume = plan(places, SEATS, 4, failed={("t3", 1, 8)})
    assert resume.step == 7
    assert "rank 1 step 8 on n1: it could not be used a moment ago" in text(resume)


@pytest.mark.parametrize(
    ("durable", "expected"),
    [
        ([], (8, "memory")),
        ([(8, 4)], (8, "memory")),
        ([(5, 4), (9, 4)], (9, "shared")),
        ([(9, 16)], (9, "shared")),
        ([(0, 4), (-3, 4)], (8, "memory")),
    ],
)
def test_the_newest_step_wins_and_memory_at_the_same_step(
    durable: list[tuple[int, int]], expected: tuple[int, str]
) -> None:
    resume = plan(healthy(7, 8), SEATS, 4, durable)
    assert (resume.step, resume.tier) == expected
    if resume.tier == "shared":
        assert resume.files == {} and resume.transfers == ()


def test_another_world_resumes_from_the_durable_directory() -> None:
    seats = {rank: SEATS[rank] for rank in range(2)}
    resume = plan(healthy(8), seats, 2, [(5, 4)])
    assert (resume.step, resume.tier) == (5, "shared")
    assert "saved by a world of 4, this one has 2" in text(resume)
    assert resume.lines[0] == "resumed step 5 from disk, saved by a world of 4"


def test_nothing_at_all() -> None:
    resume = plan([], SEATS, 4)
    assert (resume.step, resume.tier, resume.lines) == (0, "", ("nothing to resume from",))


def test_a_copy_of_an_abandoned_timeline_is_not_mixed_in() -> None:
    """A node that was cut off in epoch 1 comes back with step 9; the others did 9 in epoch 2."""
    places = healthy(8)
    fresh = [
        p._replace(holdings=[*p.holdings, held(int(p.store[1]), 9, epoch=2)]) for p in places[:3]
    ]
    late = places[3]._replace(holdings=[*places[3].holdings, held(3, 9, epoch=1)])
    resume = plan([*fresh, late], SEATS, 4)
    assert resume.step == 8


def test_whole_data_parallel_groups_bring_their_parts_to_each_node() -> None:
    """Ranks 0, 2 and 1, 3 share their state: each node needs both parts of both."""
    places = [
        p._replace(holdings=[h._replace(needs=(h.owner % 2, h.owner % 2 + 2)) for h in p.holdings])
        for p in healthy(8)
    ]
    lost = [p for p in places if p.node == "n1"]
    resume = plan(places, SEATS, 4)
    assert resume.transfers == ()
    assert resume.shards("n0") == {
        0: "own-0-8",
        1: "own-1-8",
        2: "replica-2-8",
        3: "replica-3-8",
    }
    seats = {**SEATS, 0: Seat("t8", "n4"), 1: Seat("t9", "n4")}
    resume = plan(lost, seats, 4)
    assert sorted((t.owner, t.node) for t in resume.transfers) == [(o, "n4") for o in range(4)]
    assert Counter(t.source for t in resume.transfers) == {"t2": 2, "t3": 2}
    assert Counter(t.target for t in resume.transfers) == {"t8": 2, "t9": 2}


def test_disk_comes_after_the_memory_of_peers() -> None:
    """Rank 0's memory is lost; its node's disk has it, and so has a peer's memory."""
    places = healthy(8)
    places[0] = store(0, held(0, 8, "local"), held(2, 8, "replica"))
    (transfer,) = plan(places, SEATS, 4).transfers
    assert (transfer.source, transfer.tier) == ("t2", "replica")
    places[2] = store(2, held(2, 8))
    resume = plan(places, SEATS, 4)
    (transfer,) = resume.transfers
    assert (transfer.source, transfer.host, transfer.port) == ("t0", "", 0)
    assert (transfer.target, transfer.tier) == ("t0", "local")
    assert "1 from local disks" in text(resume)


def test_the_disk_of_another_node_is_the_last_source() -> None:
    places = healthy(8)
    places[2] = store(2, held(2, 8), held(0, 8, "local"))
    places[0] = store(0, held(2, 8, "replica"))
    (transfer,) = plan(places, SEATS, 4).transfers
    assert (transfer.host, transfer.target, transfer.tier) == ("10.0.0.2", "t0", "local")


def test_sources_share_the_load() -> None:
    """Eight ranks on a new node; each snapshot is on two of four nodes."""
    world, size = 8, 10 * MIB
    places = [
        Place(f"s{n}", f"n{n}", f"h{n}", 1, [
            Holding(o, 3, world, (o,), "replica", f"replica-{o}-0", size, True, "")
            for o in range(world) if n in (o % 4, (o + 1) % 4)
        ])
        for n in range(4)
    ]  # fmt: skip
    seats = {rank: Seat(f"new{rank}", "new") for rank in range(world)}
    resume = plan(places, seats, world)
    assert Counter(t.source for t in resume.transfers) == {f"s{n}": 2 for n in range(4)}
    assert all(t.target == f"new{t.owner}" for t in resume.transfers)


def test_a_node_of_many_stores_sends_no_more_than_others() -> None:
    """Each snapshot is in a store of its own on one node, and in the only store of another."""
    many = [Place(f"a{o}", "a", "h", o, [held(o, 3, "replica")]) for o in range(4)]
    one = Place("b", "b", "h", 9, [held(o, 3, "replica") for o in range(4)])
    resume = plan([*many, one], {r: Seat(f"new{r}", "new") for r in range(4)}, 4)
    assert Counter(t.source[0] for t in resume.transfers) == {"a": 2, "b": 2}


def test_the_stores_of_a_node_share_what_all_of_them_need() -> None:
    places = [
        p._replace(holdings=[h._replace(needs=(0, 1, 2, 3)) for h in p.holdings])
        for p in healthy(8)
    ]
    seats = {0: Seat("x", "n4"), 1: Seat("y", "n4"), 2: Seat("z", "n5"), 3: Seat("z", "n5")}
    resume = plan(places, seats, 4)
    assert Counter(t.target for t in resume.transfers) == {"x": 2, "y": 2, "z": 4}


@pytest.mark.parametrize(
    "odd",
    [
        {"owner": 99},
        {"owner": -1},
        {"needs": (0, 99)},
        {"needs": (-1,)},
        {"step": -5},
        {"tier": "tape"},
        {"world": 0},
        {"ok": False, "why": ""},
    ],
)
def test_odd_copies_are_passed_over_with_a_reason(odd: dict[str, object]) -> None:
    places = change(healthy(8), 0, 8, **odd)
    resume = plan(places, SEATS, 4)
    assert resume.step == 8
    assert [t.owner for t in resume.transfers] == [0]
    assert len(resume.passed) == 1 and resume.passed[0].why


def test_a_rank_without_a_seat_is_an_error_of_the_caller() -> None:
    with pytest.raises(ValueError, match="no seat for rank 1,3 of a world of 4"):
        plan(healthy(8), {0: SEATS[0], 2: SEATS[2]}, 4)


def test_long_lists_are_cut_for_people() -> None:
    world = 100
    places = [Place("a", "a", "h", 1, [held(o, 2, "replica", world=world) for o in range(world)])]
    resume = plan(places, {rank: Seat("b", "b") for rank in range(world)}, world)
    assert len(resume.transfers) == world
    assert "… and 92 more" in resume.lines


def test_each_rank_is_written_once_from_its_own_memory() -> None:
    result = flush(healthy(7, 8), 4, [(5, 4)])
    assert result.step == 8
    assert result.writes == tuple((f"t{r}", r, f"own-{r}-8") for r in range(4))
    assert result.committer == "t0"
    assert result.lines == ("write step 8: 4 snapshots from 2 nodes",)


def test_replicas_stand_in_for_a_lost_node() -> None:
    result = flush([p for p in healthy(8) if p.node == "n1"], 4)
    assert {(w.store, w.owner) for w in result.writes} == {
        ("t2", 2), ("t3", 3), ("t2", 0), ("t3", 1)}  # fmt: skip


def test_nothing_is_written_twice_or_in_part() -> None:
    assert flush(healthy(8), 4, [(8, 4)]).writes == ()
    assert flush(healthy(8)[:1], 4).writes == ()
    assert "no step is complete" in flush(healthy(8)[:1], 4).lines[-1]
    disk = [store(r, held(r, 8, "local")) for r in range(4)]
    assert flush(disk, 4).writes == ()


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([3], "3"), ([0, 1, 2, 7, 9, 8], "0-2,7-9"), ([1, 1], "1")]
)
def test_numbers(values: list[int], expected: str) -> None:
    assert numbers(values) == expected


copies = st.builds(
    Holding,
    owner=st.integers(-1, 4),
    step=st.integers(-1, 4),
    world=st.sampled_from([3, 3, 3, 4]),
    needs=st.lists(st.integers(-1, 3), max_size=3).map(tuple) | st.just(()),
    tier=st.sampled_from(["memory", "replica", "local", "x"]),
    file=st.sampled_from(["own-0-1", "replica-1-0", "f"]),
    size=st.integers(0, 10),
    ok=st.sampled_from([True, True, True, False]),
    why=st.sampled_from(["", "torn"]),
    epoch=st.integers(1, 2),
)
worlds = st.lists(st.lists(copies, max_size=12), max_size=4).map(
    lambda stores: [
        Place(f"s{i}", f"n{i // 2}", f"h{i}", i + 1, found) for i, found in enumerate(stores)
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


@settings(max_examples=200, deadline=None)
@given(worlds, st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sets(st.integers(1, 5)))
def test_every_plan_can_be_carried_out(
    places: list[Place], where: list[int], durable: set[int]
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


@settings(max_examples=200, deadline=None)
@given(worlds)
def test_every_flush_writes_each_rank_once_or_nothing(places: list[Place]) -> None:
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
        Place(f"s{r}", f"n{r // per_node}", f"h{r}", 1, [
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
