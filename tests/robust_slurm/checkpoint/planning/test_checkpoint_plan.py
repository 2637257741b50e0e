"""The choice of the step to resume from."""

from __future__ import annotations

from collections import Counter

import pytest
from plan_places import MIB, SEATS, healthy, held

from robust_slurm.checkpoint.planning.plan import Holder, Resume, Seat, late, numbers, plan
from robust_slurm.checkpoint.store.events import WITHDRAWN, Holding


def change(
    places: list[Holder], rank: int, step: int, tier: str = "memory", /, **other
) -> list[Holder]:
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


def shared(places: list[Holder], step: int, same: dict[int, int]) -> list[Holder]:
    """Have ranks share their state at a step. ``same``: the checksum of each."""
    for rank, checksum in same.items():
        for tier in ("memory", "replica"):
            places = change(places, rank, step, tier, needs=tuple(same), same=checksum)
    return places


def test_all_copies_of_a_snapshot_that_its_rank_withdrew_are_left_out() -> None:
    """Copies of other epochs and owners stay, and replicas of a snapshot that cannot be read."""
    broken = change(healthy(7, 8), 1, 8, ok=False, why="rank 1 could not use it: size")
    assert plan(broken, SEATS, 4).step == 8
    torn = change(healthy(7, 8), 1, 8, ok=False, why=f"{WITHDRAWN}it changed")
    resume = plan(torn, SEATS, 4)
    assert resume.step == 7
    assert {p.node for p in resume.passed if "it changed" in p.why} == {"n0", "n1"}
    other = change(torn, 1, 8, epoch=2)
    assert plan(other, SEATS, 4).step == 8


def text(resume: Resume) -> str:
    return "\n".join(resume.lines)


def test_after_the_death_of_a_process_nothing_is_transferred() -> None:
    resume = plan(healthy(7, 8), SEATS, 4)
    assert (resume.step, resume.tier, resume.transfers, resume.passed) == (8, "memory", (), ())
    assert resume.shards("n0") == {0: "own-0-8", 1: "own-1-8"}
    assert resume.shards("n1") == {2: "own-2-8", 3: "own-3-8"}
    assert "resumed step 8 from memory: 4 of 4 snapshots" in text(resume)


@pytest.mark.parametrize(
    ("rank", "node", "here", "failed", "sources"),
    [
        (2, "n9", (3,), (), [(2, "t2")]),  # its own is nearer than a replica
        (2, "n9", (3,), [("t2", 2, 8)], [(2, "t0")]),
        (2, "n9", (3,), [("t2", 2, 8), ("t0", 2, 8)], []),
        (2, "n0", (0, 1, 3), (), [(2, "t0")]),  # the node's replica
        (2, "n1", (2, 3), (), []),  # where it was expected
        (3, "n9", (), (), [(2, "t2"), (3, "t3")]),  # whatever it needs
        (3, "n9", (2,), (), [(3, "t3")]),
        (7, "n9", (), (), []),
    ],
)
def test_a_rank_in_another_place_lacks(
    rank: int,
    node: str,
    here: tuple[int, ...],
    failed: list[tuple[str, int, int]],
    sources: list[tuple[int, str]],
) -> None:
    places = shared(healthy(7, 8), 8, {2: -1, 3: -1})
    resume = plan(places, SEATS, 4)
    found = late(resume, rank, Seat("t9", node), here, failed)
    assert [(t.owner, t.source) for t in found] == sources
    assert all((t.step, t.target, t.node) == (8, "t9", node) for t in found)


def test_no_state_is_put_together_of_ranks_that_do_not_hold_the_same() -> None:
    places = shared(shared(healthy(7, 8), 7, {2: 9, 3: 9}), 8, {2: 9, 3: 11})
    resume = plan(places, SEATS, 4)
    assert resume.step == 7
    assert "step 8 is incomplete: nothing usable of rank 2-3" in text(resume)
    why = "the ranks that it shares its state with do not hold the same"
    assert {(p.owner, p.step) for p in resume.passed if p.why == why} == {(2, 8), (3, 8)}
    alone = change(places, 3, 8, needs=(3,))  # 3 keeps all of its own, 2 does not know yet
    alone = change(alone, 3, 8, "replica", needs=(3,))
    resume = plan(alone, SEATS, 4)
    assert resume.step == 7
    assert {(p.owner, p.step) for p in resume.passed if p.why == why} == {(2, 8)}


def test_without_memory_nothing_is_brought_late() -> None:
    resume = plan(healthy(7, 8), SEATS, 4, durable=[(9, 4)])
    assert late(resume, 0, Seat("t9", "n9"), ()) == ()


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
    standby = {rank: Seat(f"t{2 + rank % 2}", "n1") for rank in range(4)}
    resume = plan(places, standby, 4)
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


def test_sources_share_the_load() -> None:
    """Eight ranks on a new node; each snapshot is on two of four nodes."""
    world, size = 8, 10 * MIB
    places = [
        Holder(f"s{n}", f"n{n}", f"h{n}", 1, [
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
    many = [Holder(f"a{o}", "a", "h", o, [held(o, 3, "replica")]) for o in range(4)]
    one = Holder("b", "b", "h", 9, [held(o, 3, "replica") for o in range(4)])
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
    places = [Holder("a", "a", "h", 1, [held(o, 2, "replica", world=world) for o in range(world)])]
    resume = plan(places, {rank: Seat("b", "b") for rank in range(world)}, world)
    assert len(resume.transfers) == world
    assert "… and 92 more" in resume.lines


@pytest.mark.parametrize(
    ("values", "expected"), [([], ""), ([3], "3"), ([0, 1, 2, 7, 9, 8], "0-2,7-9"), ([1, 1], "1")]
)
def test_numbers(values: list[int], expected: str) -> None:
    assert numbers(values) == expected
