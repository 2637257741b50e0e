"""The nodes in the pool: what proves a node well, who joins, who leaves."""

from __future__ import annotations

from typing import Any

import pytest
from fake_partitions import FakeJob
from standby_site import HOUR, LOW, NOW, OLD, WELL, WISH, event, sight

from health.gate.proof import EVERY_S, Proof, due, proof_of
from health.node.system import Event
from robust_slurm.slurm.model import node_from
from standby.pool.members import (
    Admission,
    Choice,
    Sight,
    Use,
    Wish,
    choose,
    demote,
    refill,
    uses,
    why_not,
)
from standby.pool.stock import Pool, stock, told


@pytest.mark.parametrize(
    ("events", "proof"),
    [
        ([], Proof()),
        ([event("boot", 9), event("xid", 8), event("skip", 7)], Proof()),
        ([event("pass", 9)], Proof(NOW - 9)),
        ([event("pass", 9), event("run", 5, closed=False)], Proof(NOW - 5)),
        ([event("run", 5, closed=True, reason="r")], Proof(0, NOW - 5, "r")),
        (
            [event("drain", 9, reason="r"), event("undrain", 5, reason="r")],
            Proof(NOW - 5, NOW - 9, "r", NOW - 5),
        ),
        ([event("run", 5, closed="no")], Proof()),  # neither true nor false: nothing is proven
        ([event("run", 5, closed=False, findings=[{"status": "WARN"}])], Proof(NOW - 5)),
        # A check that could not tell, and whose trouble the gate tolerates.
        ([event("run", 5, closed=False, findings=[{"status": "ERROR"}])], Proof()),
        ([event("run", 5, closed=False, ran=[["nvml", 3.0, "ERROR"]])], Proof()),
        ([event("run", 5, closed=False, findings="x")], Proof()),
        ([event("pass", 9), event("run", 5, closed=False, findings=[3])], Proof(NOW - 9)),
        ([event("burn-in", 9, ok=True)], Proof(burned=NOW - 9)),
        ([event("burn-in", 9, ok="yes")], Proof()),
        # Failed since; or only not tested, which says nothing.
        ([event("burn-in", 9, ok=True), event("burn-in", 5, ok=False, result="failed")], Proof()),
        (
            [event("burn-in", 9, ok=True), event("burn-in", 5, ok=False, result="untested")],
            Proof(burned=NOW - 9),
        ),
        (
            [event("burn-in", 9, ok=False, result="failed"), event("burn-in", 5, ok=True)],
            Proof(burned=NOW - 5),
        ),
    ],
)
def test_proof(events: list[Event], proof: Proof) -> None:
    assert proof_of(events) == proof


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], True),
        ([event("pass", 60)], False),
        ([event("run", 60, closed=False)], False),
        ([event("pass", EVERY_S + 1)], True),
        ([event("pass", -60)], True),  # a clock that went back
        ([event("run", 60, closed=True)], True),
    ],
)
def test_a_pass_is_written_once_an_hour(events: list[Event], expected: bool) -> None:
    assert due(events, NOW) is expected


@pytest.mark.parametrize(
    ("why", "state", "proof", "more"),
    [
        ("", "IDLE", WELL, {}),
        ("", "MIXED", WELL, {}),
        ("DRAIN+IDLE", "IDLE+DRAIN", WELL, {}),
        ("DOWN+NOT_RESPONDING", "DOWN+NOT_RESPONDING", WELL, {}),
        ("no check is on record", "IDLE", Proof(), {}),
        ("its last check failed 2 min ago: r", "IDLE", Proof(NOW - 200, NOW - 120, "r"), {}),
        ("", "IDLE", Proof(NOW - 60, NOW - 120, "r"), {}),
        ("last check passed 25 h ago; --proof-hours is 24", "IDLE", Proof(NOW - 25 * HOUR), {}),
        ("", "IDLE", Proof(), {"proof_hours": 0.0}),
        ("its last check is", "IDLE", Proof(NOW + HOUR), {}),
        ("no passed burn-in is on record", "IDLE", WELL, {"burn_in_hours": 48.0}),
        ("", "IDLE", WELL._replace(burned=NOW - 2 * HOUR), {"burn_in_hours": 48.0}),
        (
            "last burn-in 2 h ago; --burn-in-hours is 1",
            "IDLE",
            WELL._replace(burned=NOW - 2 * HOUR),
            {"burn_in_hours": 1.0},
        ),
        (
            "",
            "IDLE",
            Proof(burned=NOW - 2 * HOUR),
            {"proof_hours": 0.0, "burn_in_hours": 48.0},
        ),
        ("no check is", "IDLE", Proof(burned=NOW - 60), {"burn_in_hours": 48.0}),
    ],
)
def test_admission(why: str, state: str, proof: Proof, more: dict[str, Any]) -> None:
    wish = Wish("standby", ("s1",), 1, **more)
    said = why_not("s1", wish, sight(f"s1/{state}", proofs={"s1": proof}))
    assert said.startswith(why) if why else said == ""


def test_unknown_nodes_and_a_ledger_that_is_not_there() -> None:
    assert why_not("x9", WISH, sight()) == "Slurm does not know this node"
    assert "disk is dead" in why_not("s1", WISH, sight(unread="disk is dead"))


ALLOCATION = FakeJob("standby", "s1")
TRAIN = FakeJob("train", "s1")


@pytest.mark.parametrize(
    ("what", "wish", "seen", "admitted", "members", "claims"),
    [
        ("all join", WISH, sight(), {}, "s1 s2 s3", ""),
        ("no more than wanted", Wish("standby", WISH.nodes, 2), sight(), {}, "s1 s2", ""),
        ("no change without need", Wish("standby", WISH.nodes, 1), sight(), {"s3": OLD}, "s3", ""),
        ("surplus leaves, the last named first", Wish("standby", WISH.nodes, 1), sight(),
         {"s2": OLD, "s3": OLD}, "s2", ""),
        ("who is in use does not count", Wish("standby", WISH.nodes, 1),
         sight(jobs={1: ALLOCATION}), {"s1": OLD}, "s1 s2", ""),
        ("who is lent does", Wish("standby", WISH.nodes, 1, backfill="low"),
         sight(jobs={1: LOW}), {"s1": OLD}, "s1", ""),
        ("a drained member keeps its place and is replaced", Wish("standby", WISH.nodes, 1),
         sight("s1/IDLE+DRAIN s2 s3"), {"s1": OLD}, "s1 s2", ""),
        ("members need no new proof", WISH, sight(proofs={}), {"s1": OLD}, "s1", ""),
        ("nor while the ledger is away", WISH, sight(unread="dead"), {"s1": OLD}, "s1", ""),
        ("busy nodes come when their jobs have passed", WISH, sight(jobs={1: TRAIN}), {},
         "s2 s3", "s1"),
        ("and are not asked when idle ones do", Wish("standby", WISH.nodes, 2),
         sight(jobs={1: TRAIN}), {}, "s2 s3", ""),
        ("who is no longer named leaves", Wish("standby", ("s1",), 1), sight(),
         {"s1": OLD, "s2": OLD}, "s1", ""),
        ("but not from under a standby node", Wish("standby", ("s2",), 1),
         sight(jobs={1: ALLOCATION}), {"s1": OLD, "s2": OLD}, "s2 s1", ""),
        ("a node that is gone", WISH, sight("s1 s2"), {"s1": OLD, "s3": OLD}, "s1 s2", ""),
        ("a stranger in the partition is as any other", WISH, sight(proofs={"s2": WELL},
         standby="s1,s2"), {}, "s2", ""),
    ],
)  # fmt: skip
def test_choice(
    what: str, wish: Wish, seen: Sight, admitted: dict[str, Admission], members: str, claims: str
) -> None:
    found = choose(wish, seen, admitted)
    assert (found.members, found.claims) == (tuple(members.split()), tuple(claims.split())), what


BACK = Proof(NOW - 60, NOW - 600, "r", NOW - 60)


@pytest.mark.parametrize(
    ("policy", "proof", "where"),
    [
        ("pool", BACK, "pool"),
        ("train", BACK, "train"),
        ("pool", WELL, "train"),
        ("pool", BACK._replace(undrained=NOW - 25 * HOUR), "train"),
    ],
)
def test_refill(policy: Any, proof: Proof, where: str) -> None:
    wish = Wish("standby", ("s1",), 1, "train", refill=policy)
    assert refill(wish, proof, NOW) == where


def test_a_repaired_node_joins_while_the_pool_is_short_and_leaves_first() -> None:
    wish = Wish("standby", ("s1", "s2"), 2, "train", refill="pool")
    proofs = {"s1": WELL, "s2": WELL, "n5": BACK, "n6": WELL}
    short = sight("s1 s2/IDLE+DRAIN n5 n6", proofs=proofs, train="n5,n6")
    admitted = {"s1": OLD, "s2": OLD}
    assert choose(wish, short, admitted).members == ("s1", "s2", "n5")
    full = sight("s1 s2 n5 n6", proofs=proofs, train="n6")
    back = choose(wish, full, {**admitted, "n5": Admission(NOW, returned=True)})
    assert back.members == ("s1", "s2")
    # Taken out of train while busy: it is on its way, though train has it no more.
    busy = sight("s1 s2/IDLE+DRAIN n5", {1: FakeJob("train", "n5")}, proofs, train="n6")
    assert choose(wish, busy, admitted, taken=("n5",)).claims == ("n5",)


def test_a_job_that_starts_meanwhile_keeps_its_node() -> None:
    choice = Choice(("s1", "s2"), (), {})
    seen = sight(jobs={1: TRAIN})
    assert demote(choice, WISH, seen, {}) == Choice(("s2",), ("s1",), {})
    assert demote(choice, WISH, seen, {"s1": OLD}) == choice
    assert demote(choice, WISH, sight(jobs={1: ALLOCATION}), {}) == choice


def test_uses() -> None:
    jobs = {1: ALLOCATION, 2: LOW, 3: TRAIN, 4: FakeJob("standby", "", "PENDING")}
    jobs[5] = FakeJob("standby", "s2", "COMPLETED")
    wish = Wish("standby", ("s1",), 1, backfill="low")
    assert uses(wish, sight(jobs=jobs).jobs) == {"s1": Use((1,), (2,), (3,))}


def test_a_lease_with_ranks_is_in_use_and_any_other_is_free() -> None:
    jobs = {1: FakeJob("lease", "s1"), 2: FakeJob("lease", "s2"), 3: FakeJob("lease-held", "s2")}
    seen = sight(jobs=jobs)
    wish = Wish("standby", ("s1", "s2"), 2, lease="lease")
    assert uses(wish, seen.jobs) == {"s1": Use(leased=(1,)), "s2": Use((2,))}
    nodes = {n: node_from({"NodeName": n, "State": "ALLOCATED", "Partitions": "standby"})
             for n in ("s1", "s2")}  # fmt: skip
    found = stock(Pool("standby", "", "lease", 2, 0.0, {}), nodes, seen.jobs, 0.0)
    assert (found.free, found.leased, found.in_use, found.short) == (1, 1, 1, 1)
    assert told(found).startswith("pool standby: 1 of 2 nodes free (1 leased), 1 in use")
