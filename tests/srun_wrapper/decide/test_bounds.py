"""The suspects to evict: what can be replaced, and what the snapshots survive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from robust_slurm.checkpoint.planning.placement import place
from robust_slurm.checkpoint.planning.survival import copies as copies_of
from srun_wrapper.decide.bounds import LAST_COPY, NO_ROOM, Copies, bounded, likeliest, loses
from srun_wrapper.decide.budget import Budget
from srun_wrapper.decide.diagnose import diagnose
from srun_wrapper.decide.diagnosis import Diagnosis
from srun_wrapper.decide.failure import Failure
from srun_wrapper.decide.ladder import Means, acquit, plan

PAIRS: Copies = {  # n1 and n2 keep each other's snapshots, so do n3 and n4
    "n1": frozenset({"n2"}),
    "n2": frozenset({"n1"}),
    "n3": frozenset({"n4"}),
    "n4": frozenset({"n3"}),
}
ALONE: Copies = {"n1": frozenset({"n1"}), "n2": frozenset({"n2"})}


@pytest.mark.parametrize(
    ("suspects", "must", "room", "copies", "leave", "stay"),
    [
        ("n1 n3", "", 2, {}, "n1 n3", {}),
        ("n1 n3", "", 1, {}, "n1", {"n3": NO_ROOM}),
        ("n1 n3", "", 0, {}, "", {"n1": NO_ROOM, "n3": NO_ROOM}),
        ("n1 n3", "n2", 2, {}, "n1", {"n3": NO_ROOM}),
        ("n1 n3", "n2 n4", 1, {}, "", {"n1": NO_ROOM, "n3": NO_ROOM}),
        ("n1 n2", "n1", 2, {}, "n2", {}),  # it leaves anyway
        ("n1 n2", "", 9, PAIRS, "n1", {"n2": LAST_COPY}),
        ("n2 n1", "", 9, PAIRS, "n2", {"n1": LAST_COPY}),
        ("n1 n2 n3", "", 9, PAIRS, "n1 n3", {"n2": LAST_COPY}),
        ("n1 n2 n3", "", 1, PAIRS, "n1", {"n2": NO_ROOM, "n3": NO_ROOM}),
        ("n1", "n2", 9, PAIRS, "n1", {}),  # the likeliest one is never kept for a snapshot
        ("n3 n1", "n2", 9, PAIRS, "n3", {"n1": LAST_COPY}),
        ("n3 n4", "n1 n2", 9, PAIRS, "n3 n4", {}),  # the step is lost already
        ("n1", "", 9, ALONE, "n1", {}),
        ("n1 n2", "", 9, ALONE, "n1 n2", {}),
    ],
)
def test_bounded(
    suspects: str, must: str, room: int, copies: Copies, leave: str, stay: dict[str, str]
) -> None:
    found = bounded(suspects.split(), must.split(), room, copies)
    assert found.evict == tuple(leave.split())
    assert dict(found.stay) == stay
    assert all(node in found.told for node in stay)


NODES = st.lists(st.sampled_from([f"n{i}" for i in range(1, 7)]), unique=True)


@given(NODES, NODES, st.integers(0, 6), st.integers(2, 6))
def test_any_suspects(suspects: list[str], must: list[str], room: int, nodes: int) -> None:
    names = [f"n{1 + rank // 2}" for rank in range(2 * nodes)]
    copies = copies_of(place(names, {}), names)
    found = bounded(suspects, must, room, copies)
    assert not set(found.evict) & set(must) and len(found.evict) <= max(0, room - len(must))
    assert {*found.evict, *dict(found.stay)} == set(suspects) - set(must)
    first = {*must, *found.evict[:1]}
    assert loses(first, copies) or not loses({*must, *found.evict}, copies)
    more = bounded(suspects, must, room + 1, copies)
    assert more.evict[: len(found.evict)] == found.evict  # more room takes no one back


def test_the_likeliest_come_first() -> None:
    assert likeliest(["n1", "n2", "n3", "n4"], {"n3": 2, "n2": 1}, {"n4": 3, "n1": 1}) == (
        *("n3", "n2"),
        *("n4", "n1"),
    )


def test_copies_of_a_placement() -> None:
    names = ["n1", "n1", "n2", "n2"]
    assert copies_of((2, 3, 0, None), names) == {
        "n1": frozenset({"n2"}),
        "n2": frozenset({"n1", "n2"}),
    }


def test_a_group_that_hangs_again_leaves_unreported_and_is_acquitted() -> None:
    def hang() -> Failure:
        return Failure("hang", 1.0, 0.0, "n1", suspects=("n1", "n2"))

    budget = Budget()
    for _ in range(3):
        found = diagnose([hang()], 8)
        budget.spend(found)
    chosen = plan(found, (), budget, Means(9, 0, False, 9, copies=PAIRS))
    assert chosen.replace == ("n1",) and "n2 stays" in chosen.why
    assert found.unreported == {"n1", "n2"}
    budget.evict(found, [("n1", "s1")], ())
    again = diagnose([Failure("hang", 1.0, 0.0, "n2", suspects=("n2", "s1"))], 8)
    budget.spend(again)
    acquitted, wrong = acquit(again, budget)
    assert acquitted.suspects == () and acquitted.unreported == frozenset() and wrong == ("n1",)


@pytest.mark.parametrize(
    ("named", "leaves"),
    [
        (("n2",), ("n2",)),  # its hang is left: it could not be spared before
        (("n2", "s1"), ()),  # the replacement hangs as well: the program, or what they share
        (("n3",), ()),
        ((), ()),
    ],
)
def test_a_suspect_that_stayed_for_its_copies_leaves_at_the_next_hang(
    named: tuple[str, ...], leaves: tuple[str, ...]
) -> None:
    def hang(*suspects: str) -> Diagnosis:
        return diagnose([Failure("hang", 1.0, 0.0, (*suspects, "")[0], suspects=suspects)], 8)

    budget, have = Budget(), Means(9, 0, False, 3, copies=PAIRS)
    for _ in range(3):
        budget.spend(both := hang("n1", "n2"))
    first = plan(both, (), budget, have)
    assert (first.replace, first.kept) == (("n1",), ("n2",))
    budget.evict(both, [("n1", "s1")], (), first.kept)
    budget.spend(again := hang(*named))
    again, wrong = acquit(again, budget)
    assert wrong == (() if leaves else ("n1",))
    chosen = plan(again, (), budget, have)
    assert (chosen.action, chosen.replace) == ("swap_spare" if leaves else "restart", leaves)
    # Without a node for it the job restarts, and waits longer each time.
    assert plan(again, (), budget, Means(0, 0, False, 3, copies=PAIRS)).action == "restart"
    # And if it hangs once more without both of them, both are acquitted.
    budget.evict(again, [("n2", "s2")] if leaves else [], (), chosen.kept)
    budget.spend(last := hang("s2"))
    last, wrong = acquit(last, budget)
    assert wrong == ("n1", "n2")[: 1 + len(leaves)]
    assert plan(last, (), budget, have).action == "restart"
