"""Rings: who meets, what they show, and what becomes of nodes whose ring went wrong."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from fake_active_run import judged_of
from fake_test_worker import DIE, SILENT, Answer, passed
from hypothesis import given
from hypothesis import strategies as st

from health.active.coordinator.meeting import size
from health.active.judging.rings import LEAST, MOST, RingRemark, of_leaves, remarks, through_all
from health.active_tests import LEVELS, Measured, usual

NAMES = [f"n{i}" for i in range(1, 10)]
LEAF = {name: f"s{(number - 1) // 3}" for number, name in enumerate(NAMES, 1)}
GPU = {"backend": "nccl", "devices": ["gpu0"], "models": ["H100"]}


@pytest.mark.parametrize(
    ("nodes", "leaves", "all_of_them"),
    [
        (NAMES, [("n1", "n2", "n3"), ("n4", "n5", "n6"), ("n7", "n8", "n9")], [tuple(NAMES)]),
        (NAMES[:3], [], [("n1", "n2", "n3")]),
        (NAMES[:5], [("n1", "n2", "n3")], [("n1", "n2", "n3", "n4", "n5")]),
        (["n1", "n4", "n2", "n5"], [], [("n1", "n2", "n4", "n5")]),
        (["n1", "n2"], [], []),
        ([], [], []),
        (["x1", "x2", "x3", "n1"], [("x1", "x2", "x3")], [("x1", "x2", "x3", "n1")]),
    ],
)
def test_who_meets(
    nodes: list[str], leaves: list[tuple[str, ...]], all_of_them: list[tuple[str, ...]]
) -> None:
    assert of_leaves(nodes, LEAF) == leaves
    assert through_all(nodes, LEAF) == all_of_them


@given(st.lists(st.integers(0, 4), max_size=700), st.booleans())
def test_rings_are_of_one_leaf_and_nobody_meets_twice_at_once(
    leaf: list[int], one_big: bool
) -> None:
    nodes = [f"n{i}" for i in range(len(leaf))]
    leaf_of = {node: f"s{0 if one_big and i > 9 else leaf[i]}" for i, node in enumerate(nodes)}
    first, second = of_leaves(nodes, leaf_of), through_all(nodes, leaf_of)
    for found in (first, second):
        seen = [node for ring in found for node in ring]
        assert len(seen) == len(set(seen)) and set(seen) <= set(nodes)
        assert all(LEAST <= len(ring) <= MOST for ring in found)
    assert all(len({leaf_of[node] for node in ring}) == 1 for ring in first)
    assert len(second) == (len(nodes) >= LEAST)
    if second:
        assert {leaf_of[n] for n in second[0]} == set(leaf_of.values()), "of every leaf"
        order = [leaf_of[node] for node in second[0]]
        changes = sum(one != other for one, other in pairwise(order))
        assert changes == len(set(order)) - 1, "neighbours share a leaf where they can"


def sides(*speeds: float, model: str = "H100", wrong: str = "") -> list[Measured]:
    nodes = tuple(f"n{i}" for i in range(1, len(speeds) + 1))
    return [
        Measured(
            "ring", node, model=model, peers=nodes,
            values={"busbw_gbps": speed} if speed else {},
            wrong=(wrong,) if wrong and node == "n2" else (),
            error="" if speed else "peer n9 did not come within 3 s",
        )
        for node, speed in zip(nodes, speeds, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "usual_gbps", "said"),
    [
        (sides(10, 10, 10), 11.0, None),
        (sides(10, 10, 5.4), 11.0, (False, "n[1-3]: 5.4 GB/s, pairs 11: test the switches")),
        (sides(10, 10, 5.4, model="cpu"), 11.0, None),  # cores that others use
        (sides(10, 10, 5.4), None, None),  # of several kinds: no standard
        (sides(10, 10, 0), 11.0, None),  # it did not end: an error, and that is told elsewhere
        (
            sides(10, 10, 10, wrong="all-reduce 1: got 3"),
            11.0,
            (True, "wrong result (n2: all-reduce 1:"),
        ),
        (
            sides(1, 1, 1, wrong="all-reduce 1: got 3"),
            11.0,
            (True, "their pairs gave right results"),
        ),
    ],
)
def test_what_a_ring_shows(
    measured: list[Measured], usual_gbps: float | None, said: tuple[bool, str] | None
) -> None:
    found = remarks([*measured, Measured("pair", "n1", values={"busbw_gbps": 1.0})], usual_gbps)
    if said is None:
        assert found == []
    else:
        ((nodes, wrong, text),) = found
        assert (nodes, wrong) == (("n1", "n2", "n3"), said[0]) and said[1] in text


def test_two_rings_are_two_remarks() -> None:
    (one, *_), others = sides(1, 1, 1), sides(9, 9, 9, 9)
    found = remarks([one, *others, *sides(1, 1, 1)[1:]], 10.0)
    assert found == [RingRemark(("n1", "n2", "n3"), False, found[0].text)]


def answers(bad: dict[str, Any], nodes: list[str] = NAMES) -> dict[str, Answer]:
    """Healthy workers, of which some answer rings of their leaf with more."""

    def of(node: str) -> Answer:
        def answer(task: dict[str, Any]) -> Any:
            if task["test"] != "ring" or node not in bad:
                return passed(task)
            return bad[node] if isinstance(bad[node], str) else passed(task, **bad[node])

        return answer

    return {node: of(node) for node in nodes}


def test_all_is_well() -> None:
    said: list[str] = []
    judged = judged_of(answers({}), ("pair", "ring"), said=said.append, leaf_of=LEAF)
    assert judged.cleared == set(NAMES) and not judged.findings and not judged.left_out
    assert said[-2:] == ["3 rings of 3, 3, 3 nodes", "1 ring of 9 nodes"]
    assert [m.test for m in judged.measured].count("ring") == 18


def test_a_wrong_sum_is_of_its_leaf_and_of_nobody() -> None:
    said: list[str] = []
    bad = {"n5": {"wrong": ["all-reduce 1: rank 1 of 3 got 3"]}}
    judged = judged_of(answers(bad), ("pair", "ring"), said=said.append, leaf_of=LEAF)
    assert not judged.named and not judged.errors
    assert judged.cleared == set(NAMES) - {"n4", "n5", "n6"}
    for node in ("n4", "n5", "n6"):
        (finding,) = judged.findings[node]
        assert (finding.status, finding.check) == ("WARN", "active-undecided")
        assert "n5: all-reduce 1: rank 1 of 3 got 3" in finding.evidence
    assert said[-1] == "1 ring of 6 nodes", "what was good goes on"


def test_a_worker_that_dies_takes_its_ring_and_no_other() -> None:
    failed = {"error": "peer n2 did not come within 3 s", "values": {}}
    bad = {"n1": failed, "n2": DIE, "n3": failed}
    judged = judged_of(answers(bad), ("ring",), leaf_of=LEAF)
    assert not judged.named and set(judged.errors) == {"n1", "n2", "n3"}
    assert judged.cleared == set(NAMES[3:])


def test_a_slow_ring_is_said_and_clears_all_the_same() -> None:
    gpu = {"model": "H100"}
    bad = dict.fromkeys(NAMES, gpu) | {"n2": gpu | {"values": {"busbw_gbps": 3.0}}}
    judged = judged_of(answers(bad, NAMES[:4]), ("pair", "ring"), ready=GPU)
    assert judged.cleared == set(NAMES[:4])
    for node in NAMES[:4]:
        (finding,) = judged.findings[node]
        assert (finding.status, finding.check) == ("WARN", "active-ring-slow")


def test_only_those_that_passed_meet() -> None:
    def broken(task: dict[str, Any]) -> Any:
        return passed(task, wrong=["17 numbers"]) if task["test"] == "gemm" else passed(task)

    judged = judged_of(answers({}, NAMES[:4]) | {"n1": broken}, ("gemm", "pair", "ring"))
    assert set(judged.named) == {"n1"} and judged.cleared == {"n2", "n3", "n4"}
    assert {m.node for m in judged.measured if m.test == "ring"} == {"n2", "n3", "n4"}


def test_the_first_rings_count_when_no_time_is_left_for_the_last() -> None:
    """One worker that is silent uses up the time of all."""
    bad = {"n2": {"wrong": ["all-reduce 1: got 3"]}, "n5": SILENT}
    judged = judged_of(answers(bad), ("ring",), limit=9.0, leaf_of=LEAF)
    assert "ring: no time for 1 ring" in judged.left_out
    assert judged.cleared == set(NAMES[5:]) | {"n4"} and not judged.named
    assert {n for n, found in judged.findings.items() if found[0].status == "WARN"} == {
        "n1", "n2", "n3",
    }  # fmt: skip
    assert "test them in pairs" in judged.findings["n2"][0].evidence


def test_messages_grow_with_the_ring() -> None:
    assert [size("nccl", nodes) >> 20 for nodes in (2, 3, 8, 128)] == [64, 64, 256, 1024]
    assert size("gloo", 128) == size("strange", 2) == 4 << 20


def test_two_nodes_are_no_ring() -> None:
    judged = judged_of(answers({}, NAMES[:2]), ("pair", "ring"))
    assert judged.cleared == {"n1", "n2"}
    assert judged.left_out == ("ring: fewer than 3 nodes of one kind have passed",)


def test_without_time_it_is_left_out() -> None:
    judged = judged_of(answers({}), ("pair", "ring"), limit=10.0, leaf_of=LEAF)
    assert judged.cleared == set(NAMES)
    assert judged.left_out == ("ring: needs 8 s, and of 9.8 s 0.8 are left",)


@pytest.mark.parametrize("level", LEVELS)
def test_quick_runs_have_none_unless_asked(level: Any) -> None:
    assert ("ring" in usual(level)) == (level != "quick")
