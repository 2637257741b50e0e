"""Minipods from a topology, the spread of a job's groups, and which standby is chosen."""

from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from standby.placement.choose import UNKNOWN, choose
from standby.placement.spread import Groups, fits, groups, spread
from standby.placement.topology import minipods

LEAF_SPINE_CORE = """\
SwitchName=l0 Level=0 LinkSpeed=1 Nodes=n[1-2]
SwitchName=l1 Level=0 LinkSpeed=1 Nodes=n[3-4]
SwitchName=l2 Level=0 LinkSpeed=1 Nodes=n[5-6]
SwitchName=p0 Level=1 LinkSpeed=1 Nodes=n[1-4] Switches=l[0-1]
SwitchName=p1 Level=1 LinkSpeed=1 Nodes=n[5-6] Switches=l2
SwitchName=core Level=2 LinkSpeed=1 Nodes=n[1-6] Switches=p[0-1]
"""
PODS = {"n1": "p0", "n2": "p0", "n3": "p0", "n4": "p0", "n5": "p1", "n6": "p1"}


def test_minipods_are_what_lies_below_the_spine() -> None:
    assert minipods(LEAF_SPINE_CORE) == PODS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Two levels: the leaf is what tells nodes apart.
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\nSwitchName=top Switches=s[0-1]",
         {"a": "s0", "b": "s1"}),
        ("SwitchName=s0 Nodes=a,b", {"a": "s0", "b": "s0"}),
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b", {"a": "s0", "b": "s1"}),
        # A forest: each tree by its top.
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\nSwitchName=s2 Nodes=c\n"
         "SwitchName=x Switches=s[0-1]\nSwitchName=y Switches=s2",
         {"a": "x", "b": "x", "c": "y"}),
        # A branch that ends early counts by its top.
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\nSwitchName=s2 Nodes=c\n"
         "SwitchName=x Switches=s[0-1]\nSwitchName=top Switches=x,s2",
         {"a": "x", "b": "x", "c": "top"}),
        ("SwitchName=s0 Nodes=a\nSwitchName=x Switches=s0\nSwitchName=s0 Switches=x", {"a": "s0"}),
        ("BlockName=b1 BlockIndex=0 Nodes=n[1-2] BlockSize=2\nBlockName=b2 Nodes=n3",
         {"n1": "b1", "n2": "b1", "n3": "b2"}),
        # An unreadable upper level leaves the leaves.
        ("SwitchName=s0 Nodes=a\nSwitchName=s1 Nodes=b\nSwitchName=x Switches=s[0-",
         {"a": "s0", "b": "s1"}),
        ("SwitchName=s0 Nodes=a\nSwitchName=x Switches=s[0-999999999]", {"a": "s0"}),
        ("", {}),
        ("No topology information available\n", {}),
        ("SwitchName=s0 Nodes=n[1-2", {}),
    ],
)  # fmt: skip
def test_odd_trees(text: str, expected: dict[str, str]) -> None:
    assert minipods(text) == expected


WORDS = ["SwitchName=s0", "switchname = s1", "Nodes=n[1-3]", "Switches=s[0-1]", "Switches=s0",
         "Switches=[", "Level=1", "\\\n", "\n", "#", "=", "Switches=@x"]  # fmt: skip


@given(st.lists(st.sampled_from(WORDS) | st.text(max_size=6), max_size=14))
def test_odd_text_never_raises(words: list[str]) -> None:
    assert all(node and pod for node, pod in minipods(" ".join(words)).items())


def _singles(n: int) -> tuple[tuple[int, ...], ...]:
    return tuple((i,) for i in range(n))


@pytest.mark.parametrize(
    ("mesh", "ranks", "places", "expected"),
    [
        ({"pp": 2, "dp": 4, "tp": 2}, 4, 4,
         Groups(((0, 1), (2, 3)), ((0, 2), (1, 3)), _singles(4))),
        ({"dp": 2, "pp": 2}, 1, 4, Groups(((0, 2), (1, 3)), ((0, 1), (2, 3)), _singles(4))),
        # A tensor group on two nodes.
        ({"dp": 2, "tp": 4}, 2, 4, Groups(((0, 2), (1, 3)), _singles(4), ((0, 1), (2, 3)))),
        # Everything that gradients are reduced over is one.
        ({"dp_replicate": 2, "pp": 2, "dp_shard": 2}, 2, 4,
         Groups(((0, 2), (1, 3)), ((0, 1), (2, 3)), _singles(4))),
        # Not this world's mesh, or none: one data-parallel group.
        ({"pp": 3}, 1, 4, Groups(((0, 1, 2, 3),), _singles(4), _singles(4))),
        ({"pp": 0}, 1, 2, Groups(((0, 1),), _singles(2), _singles(2))),
        ({}, 2, 2, Groups(((0, 1),), _singles(2), _singles(2))),
        # Cyclic: node 0 runs ranks 0 and 2.
        ({"pp": 2, "dp": 2}, [[0, 2], [1, 3]], 2, Groups(((0, 1),), _singles(2), _singles(2))),
        ({"dp": 3}, [[0, 1], [2]], 2, Groups(((0, 1),), _singles(2), _singles(2))),
        # Groups that do not divide nodes: place 1 is in two DP groups.
        ({"pp": 2, "dp": 3}, 2, 3, Groups(((0, 1), (1, 2)), ((0, 1), (0, 2), (1, 2)),
                                          _singles(3))),
    ],
)  # fmt: skip
def test_groups(mesh: dict[str, int], ranks: Any, places: int, expected: Groups) -> None:
    assert groups(mesh, ranks, places) == expected


@pytest.mark.parametrize(
    ("ranks", "places", "match"),
    [(0, 2, "0 ranks per node"), ([[0]], 2, "1 nodes for 2 places"),
     ([[0], [2]], 2, "not 0 to 1"), ([[0], [0]], 2, "not 0 to 1")],
)  # fmt: skip
def test_ranks_that_are_no_world(ranks: Any, places: int, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        groups({}, ranks, places)


def test_spread_is_that_of_the_worst_group() -> None:
    job = groups({"pp": 2, "dp": 2}, 1, 4)  # DP groups 0,1 and 2,3; PP groups 0,2 and 1,3
    found = spread(job, ["a", "a", "a", "b"])
    assert (found.dp, found.pp, found.total) == (2, 2, 1 + 2 + 1 + 2 + 4)
    assert spread(job, ["a", "a", "b", "b"]).weighted(0.3) == pytest.approx(0.3 * 1 + 0.7 * 2)
    assert fits({"pp": 2, "dp": 2}, 4)
    assert not fits({"pp": 2, "dp": 2}, 5)


# Four nodes of one rank: DP groups a1,a2 and b1,b2; PP groups a1,b1 and a2,b2.
PLACES = ["a1", "a2", "b1", "b2"]
MESH = {"pp": 2, "dp": 2}
SWITCHES = {"a1": "A", "a2": "A", "b1": "B", "b2": "B", "sa": "A", "sb": "B", "sc": "C",
            "ta": "A", "z1": "B", "z2": "A"}  # fmt: skip


@pytest.mark.parametrize(
    ("lost", "candidates", "expected"),
    [
        (["a1"], ["sb", "sa"], {"a1": "sa"}),
        (["b1"], ["sa", "sb", "sc"], {"b1": "sb"}),
        # Equal maximum: the smaller total, which is the node where the other groups are.
        (["b1"], ["sa", "sc"], {"b1": "sa"}),
        # Equal in all: the first by name.
        (["a1"], ["ta", "sa"], {"a1": "sa"}),
        # By name each would get the other's.
        (["a1", "b1"], ["z1", "z2"], {"a1": "z2", "b1": "z1"}),
        (["b1", "a1"], ["z2", "z1"], {"a1": "z2", "b1": "z1"}),
        # Too few: the one that costs least is filled.
        (["a1", "b1"], ["sb"], {"b1": "sb"}),
        (["a1"], [], {}),
        ([], ["sa"], {}),
        # What is in the job already, lost or not, is no candidate.
        (["a1"], ["a1", "b2", "sc"], {"a1": "sc"}),
        # One that nobody knows is one minipod more.
        (["a1"], ["nowhere", "sa"], {"a1": "sa"}),
        (["a1", "a1"], ["sa"], {"a1": "sa"}),
    ],
)  # fmt: skip
def test_choices(lost: list[str], candidates: list[str], expected: dict[str, str]) -> None:
    assert choose(lost, candidates, PLACES, MESH, 1, SWITCHES) == expected


def test_alpha_decides_between_the_groups() -> None:
    # Pipelines are rows, DP groups columns; no line has more than two minipods.
    grid = ["-AB", "CAA", "DAA"]
    pods = {f"n{i}": pod for i, pod in enumerate("".join(grid))} | {"s1": "C", "s2": "A"}
    places = [f"n{i}" for i in range(9)]
    mesh = {"dp": 3, "pp": 3}
    assert choose(["n0"], ["s1", "s2"], places, mesh, 1, pods, alpha=0.3) == {"n0": "s2"}
    assert choose(["n0"], ["s1", "s2"], places, mesh, 1, pods, alpha=0.7) == {"n0": "s1"}


def test_without_topology_the_first_by_name() -> None:
    assert choose(["a2", "b1"], ["s3", "s1", "s2"], PLACES, MESH, 1, {}) == {"a2": "s1", "b1": "s2"}


@pytest.mark.parametrize(
    ("lost", "places", "alpha", "match"),
    [(["q"], PLACES, 0.3, "not in the job: q"), (["a1"], ["a1", "a1"], 0.3, "1 different"),
     (["a1"], PLACES, 1.5, "alpha 1.5"), (["a1"], PLACES, float("nan"), "alpha nan")],
)  # fmt: skip
def test_bad_input(lost: list[str], places: list[str], alpha: float, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        choose(lost, ["sa"], places, MESH, 1, SWITCHES, alpha)


def _best(
    lost: Sequence[str], candidates: Sequence[str], places: list[str], mesh: dict[str, int],
    switches: dict[str, str], alpha: float,
) -> tuple[float, int, tuple[str, ...]]:  # fmt: skip
    """Return the best by trying everything: score and the names, place by place."""
    job, spots = groups(mesh, 1, len(places)), sorted(places.index(node) for node in lost)
    found = []
    for names in permutations(sorted(candidates), len(spots)):
        now = list(places)
        for spot, name in zip(spots, names, strict=True):
            now[spot] = name
        cost = spread(job, [switches.get(node, UNKNOWN) for node in now])
        found.append((cost.weighted(alpha), cost.total, names))
    return min(found)


@settings(deadline=None)
@given(st.data())
def test_nothing_is_better_than_what_is_chosen(data: st.DataObject) -> None:
    names = data.draw(st.permutations(["pp", "dp"]))
    mesh = {name: data.draw(st.integers(1, 4)) for name in names}
    places = [f"n{i}" for i in range(mesh["pp"] * mesh["dp"])]
    lost = data.draw(st.lists(st.sampled_from(places), unique=True, max_size=3))
    candidates = [f"s{i}" for i in range(data.draw(st.integers(len(lost), 5)))]
    switches = {n: data.draw(st.sampled_from("ABC")) for n in [*places, *candidates]}
    alpha = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    takes = choose(lost, candidates, places, mesh, 1, switches, alpha)
    by_place = tuple(takes[node] for node in places if node in takes)
    swapped = [switches[takes.get(node, node)] for node in places]
    after = spread(groups(mesh, 1, len(places)), swapped)
    now = after.weighted(alpha), after.total, by_place
    assert now == _best(lost, candidates, places, mesh, switches, alpha)


@settings(deadline=None, max_examples=8)
@given(st.data())
def test_many_lost_at_once(data: st.DataObject) -> None:
    """More than can be tried: still everybody placed, nobody twice, in whatever order they come."""
    mesh = {"pp": 4, "dp": 16}
    places = [f"n{i}" for i in range(64)]
    lost = places[:24]
    candidates = [f"s{i}" for i in range(data.draw(st.integers(20, 40)))]
    pods = [f"p{i}" for i in range(8)]
    switches = {n: data.draw(st.sampled_from(pods)) for n in [*places, *candidates]}
    takes = choose(lost, candidates, places, mesh, 1, switches)
    assert len(takes) == min(len(lost), len(candidates))
    assert set(takes) <= set(lost)
    assert len(set(takes.values())) == len(takes)
    assert set(takes.values()) <= set(candidates)
    assert takes == choose(lost, candidates[::-1], places, mesh, 1, switches)
