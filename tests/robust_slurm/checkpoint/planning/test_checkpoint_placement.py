"""The places of replicas, and the losses that the placement survives."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from robust_slurm.checkpoint.planning.placement import Holders, RankLayout, place
from robust_slurm.checkpoint.planning.survival import survives


def blocks(ranks: int, per_node: int) -> list[str]:
    """Slurm's usual order: node after node."""
    return [f"n{r // per_node}" for r in range(ranks)]


def scattered(factor: int, power: int, count: int) -> list[str]:
    return [f"n{(factor * r**power + 13) % count}" for r in range(10_000)]


def switches(nodes: list[str], per_switch: int) -> dict[str, str]:
    return {name: f"s{i // per_switch}" for i, name in enumerate(dict.fromkeys(nodes))}


def coordinates(mesh: dict[str, int], rank: int) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh.values()):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def groups(mesh: dict[str, int]) -> dict[str, list[set[int]]]:
    """Every dimension's groups of ranks, by definition: equal in all other coordinates."""
    names = list(mesh)
    world = list(product(*(range(size) for size in mesh.values())))
    found: dict[str, list[set[int]]] = {}
    for d, name in enumerate(names):
        if mesh[name] > 1:
            members: dict[tuple[int, ...], set[int]] = {}
            for rank, at in enumerate(world):
                members.setdefault((*at[:d], *at[d + 1 :]), set()).add(rank)
            found[name] = list(members.values())
    return found


def level(holders: Holders, nodes: list[str], mesh: dict[str, int], leaf: dict[str, str]) -> str:
    """Return how far apart all ranks are from their holders, by definition."""
    pairs = [(owner, holder) for owner, holder in enumerate(holders) if holder is not None]
    if not pairs:
        return "none"
    group_of = [
        {rank: number for number, members in enumerate(found) for rank in members}
        for found in groups(mesh).values()
    ]
    groups_apart = len(group_of) > 1 and all(of[o] != of[h] for of in group_of for o, h in pairs)
    switch = [leaf.get(name, "") for name in nodes]
    switch_apart = len(set(switch)) > 1 and all(switch[o] != switch[h] for o, h in pairs)
    if groups_apart:
        return "groups+switch" if switch_apart else "groups"
    return "switch" if switch_apart else "node"


def losses(text: str) -> tuple[list[str], list[str]]:
    """The losses that ``survives`` says are survived, and those that are not."""
    good, _, fatal = f"; {text}".partition("; not ")
    return good.removeprefix("; ").split(", "), fatal.split(", ")


@pytest.mark.parametrize("mesh", [{"pp": 4, "dp": 2, "tp": 2}, {"dp": 2, "pp": 4, "tp": 2}])
def test_the_papers_example_comes_out(mesh: dict[str, int]) -> None:
    """ByteRobust: TP2 PP4 DP2, ranks 8,9 ↔ 2,3; in both usual orders of ranks."""
    nodes = blocks(16, 2)
    holders, leaf = place(nodes, mesh), switches(nodes, 4)
    assert [holders[r] for r in (8, 9, 2, 3)] == [2, 3, 8, 9]
    assert level(holders, nodes, mesh, {}) == "groups"
    assert level(place(nodes, mesh, leaf), nodes, mesh, leaf) == "groups+switch"
    assert set(survives(holders, nodes, mesh).split(", ")) == {
        "any 1 node", "any 1 pipeline group", "any 1 data-parallel group", "any 1 tensor group",
        "24 of 28 pairs of nodes",
    }  # fmt: skip


TWO_BY_TWO = {"dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("nodes", "mesh", "leaf", "expected"),
    [
        (list("abcd"), TWO_BY_TWO, {}, "groups"),
        (list("abcd"), TWO_BY_TWO, {"a": "s", "b": "s", "c": "t", "d": "t"}, "groups+switch"),
        (list("abcd"), TWO_BY_TWO, dict.fromkeys("abcd", "s"), "groups"),
        # The only rank that shares no group is behind the same switch.
        (list("abcd"), TWO_BY_TWO, {"a": "s", "b": "t", "c": "t", "d": "s"}, "groups"),
        (list("aabb"), TWO_BY_TWO, {}, "groups"),
        (list("abcd"), {"dp": 4}, {}, "node"),
        (list("abcd"), {"dp": 4}, {"a": "s", "b": "s", "c": "t", "d": "t"}, "switch"),
        (list("abcd"), {"dp": 4, "tp": 1}, {}, "node"),
        (list("abcd"), {}, {"a": "s", "b": "s", "c": "s", "d": "t"}, "node"),
        (list("abcd"), {"dp": 3}, {}, "node"),
        (list("abcd"), {"dp": -2, "pp": -2}, {}, "node"),
        (list("aabb"), {"pp": 2, "tp": 2}, {}, "groups"),
        (list("aaaa"), TWO_BY_TWO, {"a": "s"}, "none"),
        ([], {}, {}, "none"),
        (["a"], {"dp": 1}, {}, "none"),
    ],
)
def test_levels(
    nodes: list[str], mesh: dict[str, int], leaf: dict[str, str], expected: str
) -> None:
    assert level(place(nodes, mesh, leaf), nodes, mesh, leaf) == expected


def test_alone_on_one_node() -> None:
    holders = place(["a", "a"], {"dp": 2})
    assert holders == (None, None)
    assert survives(holders, ["a", "a"], {"dp": 2}) == "not 1 node, 1 data-parallel group"


def test_a_crowded_node_spreads_its_replicas_evenly() -> None:
    """A standby node runs a lost node's ranks beside its own."""
    nodes = ["a", "b", "c", "c", "c", "c", "c"]
    holders = place(nodes, {})
    assert level(holders, nodes, {}, {}) == "node"
    load = Counter(holders)
    assert (load[0], load[1]) in ((2, 3), (3, 2))
    assert all(load[r] <= 1 for r in range(2, 7))


def test_survival_in_words() -> None:
    nodes = list("aabb")
    text = survives(place(nodes, TWO_BY_TWO), nodes, TWO_BY_TWO, {"a": "s", "b": "s"})
    assert text == (
        "any 1 node, any 1 pipeline group; not 1 data-parallel group (it takes all nodes), "
        "1 leaf switch (it takes all nodes)"
    )


def test_survival_is_computed_from_the_holders_that_there_are() -> None:
    nodes = list("abcd")
    leaf = {"a": "s", "b": "s", "c": "t", "d": "t"}
    next_one = (1, 0, 3, 2)  # the neighbour in the group
    assert survives(next_one, nodes, TWO_BY_TWO, leaf) == (
        "any 1 node, any 1 data-parallel group, 4 of 6 pairs of nodes; "
        "not 1 pipeline group (2 of 2), 1 leaf switch (2 of 2)"
    )
    partly = (2, None, 0, 1)
    assert survives(partly, nodes, {}) == "2 of 6 pairs of nodes; not 1 node (1 of 4)"


def test_dimensions_of_one_kind_are_named() -> None:
    nodes = blocks(8, 1)
    mesh = {"dp_replicate": 2, "dp_shard": 2, "weird": 2}
    assert (
        "any 1 data-parallel group (dp_replicate), any 1 data-parallel group (dp_shard), "
        "any 1 weird group, "
    ) in survives(place(nodes, mesh), nodes, mesh)


@pytest.mark.parametrize(
    ("nodes", "mesh", "limit"),
    [
        (blocks(10_000, 8), {"pp": 5, "dp": 250, "tp": 8}, 50_000),
        (blocks(10_000, 8), {"dp": 1250, "tp": 8}, 50_000),
        (blocks(10_000, 8), {"dp": 10_000}, 50_000),
        (blocks(10_000, 1), {"pp": 10, "dp": 100, "cp": 2, "tp": 5}, 50_000),
        # Ranks all over the nodes: no shift of coordinates fits. (A million is about 0.7 s.)
        (scattered(7919, 1, 1250), {"pp": 5, "dp": 250, "tp": 8}, 1_500_000),
        (scattered(1, 2, 1249), {"pp": 5, "dp": 250, "tp": 8}, 1_500_000),
    ],
)
def test_ten_thousand_ranks(
    nodes: list[str], mesh: dict[str, int], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0
    common = RankLayout.common

    def counted(world: RankLayout, owner: int, holder: int) -> int:
        nonlocal compared
        compared += 1
        return common(world, owner, holder)

    monkeypatch.setattr(RankLayout, "common", counted)
    leaf = switches(nodes, 32)
    holders = place(nodes, mesh, leaf)
    assert max(Counter(holders).values()) == 1
    assert level(holders, nodes, mesh, leaf) != "node"
    assert all(nodes[h] != nodes[o] for o, h in enumerate(holders) if h is not None)
    assert compared < limit


# Small worlds: meshes, nodes that hold any ranks, switches for some nodes.
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(
    lambda sizes: 2 <= total(sizes) <= 16
)


def total(sizes: list[int]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


@st.composite
def worlds(draw: st.DrawFn, largest: int = 16) -> tuple[list[str], dict[str, int], dict[str, str]]:
    sizes = draw(meshes.filter(lambda s: total(s) <= largest))
    mesh = dict(zip(["pp", "dp", "tp"], sizes, strict=False))
    count = total(sizes)
    nodes = draw(
        st.integers(1, count).map(lambda per: blocks(count, per))
        | st.lists(st.sampled_from("abcde"), min_size=count, max_size=count)
    )
    leaf = draw(st.dictionaries(st.sampled_from(sorted(set(nodes))), st.sampled_from("xyz")))
    return nodes, mesh, leaf


@settings(max_examples=200, deadline=None)
@given(worlds())
def test_every_rank_has_a_holder_on_another_node(
    world: tuple[list[str], dict[str, int], dict[str, str]],
) -> None:
    nodes, mesh, leaf = world
    holders = place(nodes, mesh, leaf)
    assert holders == place(nodes, mesh, leaf)
    assert len(holders) == len(nodes)
    if len(set(nodes)) == 1:
        assert set(holders) == {None}
        return
    load = Counter(holders)
    crowded = max(Counter(nodes).values())
    outside = len(nodes) - crowded
    assert max(load.values()) <= max(1, -(-crowded // outside))
    for owner, holder in enumerate(holders):
        assert holder is not None
        assert nodes[owner] != nodes[holder]


def possible(
    nodes: list[str], mesh: dict[str, int], leaf: dict[str, str], apart: bool, switch: bool
) -> bool:
    """Return whether any permutation puts all on other nodes, and so on. By trying them all."""
    shared = [members for found in groups(mesh).values() for members in found] if apart else []
    size = range(len(nodes))
    allowed = {
        (o, h)
        for o, h in product(size, size)
        if nodes[o] != nodes[h]
        and not any({o, h} <= members for members in shared)
        and not (switch and leaf.get(nodes[o], "") == leaf.get(nodes[h], ""))
    }
    return any(
        all(pair in allowed for pair in enumerate(holders)) for holders in permutations(size)
    )


@settings(max_examples=120, deadline=None)
@given(worlds(largest=7))
def test_no_better_level_was_possible(
    world: tuple[list[str], dict[str, int], dict[str, str]],
) -> None:
    nodes, mesh, leaf = world
    if 2 * max(Counter(nodes).values()) > len(nodes):
        return  # no permutation at all
    found = level(place(nodes, mesh, leaf), nodes, mesh, leaf)
    switched = len({leaf.get(name, "") for name in nodes}) > 1
    grouped = len(groups(mesh)) > 1
    assert found.startswith("groups") == (grouped and possible(nodes, mesh, leaf, True, False))
    if not found.startswith("groups"):
        assert (found == "switch") == (switched and possible(nodes, mesh, leaf, False, True))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    meshes.filter(lambda s: total(s) <= 8 and sum(size > 1 for size in s) > 1),
    st.lists(st.sampled_from("xyz"), min_size=8, max_size=8),
)
def test_a_switch_apart_wherever_possible(sizes: list[int], where: list[str]) -> None:
    """One rank on each node, so that to share a group is to be on its nodes."""
    mesh = dict(zip(["pp", "dp", "tp"], sizes, strict=False))
    nodes = blocks(total(sizes), 1)
    leaf = dict(zip(nodes, where, strict=False))
    found = level(place(nodes, mesh, leaf), nodes, mesh, leaf)
    if possible(nodes, mesh, leaf, True, False) and len(set(leaf.values())) > 1:
        assert (found == "groups+switch") == possible(nodes, mesh, leaf, True, True)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(worlds(), st.data())
def test_survival_agrees_with_losing_them_one_by_one(
    world: tuple[list[str], dict[str, int], dict[str, str]], data: st.DataObject
) -> None:
    nodes, mesh, leaf = world
    any_rank = st.none() | st.integers(0, len(nodes) - 1)
    holders = data.draw(
        st.just(place(nodes, mesh, leaf))
        | st.lists(any_rank, min_size=len(nodes), max_size=len(nodes)).map(tuple)
    )
    good, fatal = losses(survives(holders, nodes, mesh, leaf))

    def lives(lost: set[str]) -> bool:
        return all(
            nodes[owner] not in lost or (holder is not None and nodes[holder] not in lost)
            for owner, holder in enumerate(holders)
        )

    names = sorted(set(nodes))
    each = {"any 1 node": [{name} for name in names]}
    kinds = {"pp": "pipeline", "dp": "data-parallel", "tp": "tensor"}
    for name, members in groups(mesh).items():
        each[f"any 1 {kinds[name]} group"] = [{nodes[r] for r in group} for group in members]
    if leaf:
        each["any 1 leaf switch"] = [
            {n for n in names if leaf.get(n) == one} for one in set(leaf.values())
        ]
    for what, sets in each.items():
        assert (what in good) == all(map(lives, sets)), what
        assert any(f.startswith(what.removeprefix("any ")) for f in fatal) == (what not in good)
    pairs = [set(pair) for pair in combinations(names, 2)]
    if len(names) > 2:
        alive = sum(map(lives, pairs))
        expected = f"{alive} of {len(pairs)} pairs of nodes"
        assert (expected in good) == (alive > 0)
        assert ("2 nodes" in fatal) == (alive == 0)
