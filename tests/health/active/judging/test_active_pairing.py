"""Pairs, and the naming of bad nodes, by a network that is made up."""

import random
import re
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.active.judging.pairing import ROUNDS, Pair, Pairing, PairResult, PairVerdict

Measure = Callable[[Pair], PairResult]
FAULTS = ("slow", "wrong", "error")


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def leaves(count: int, size: int) -> dict[str, str]:
    return {node: f"l{i // size}" for i, node in enumerate(names(count))}


def network(faults: Mapping[str, str], leaf_of: Mapping[str, str] = {}) -> Measure:
    """Without noise: 40 GB/s inside a leaf, 36 across, 10 where a node is slow."""

    def measure(pair: Pair) -> PairResult:
        kinds = {faults[node] for node in pair if node in faults}
        if "error" in kinds:
            return PairResult(*pair, None, False, "torch cannot be imported")
        far = leaf_of.get(pair.one) != leaf_of.get(pair.other)
        speed = 10.0 if "slow" in kinds else 36.0 if far else 40.0
        return PairResult(*pair, speed, "wrong" in kinds, "", "rank 0 got 3, not 2")

    return measure


def finish(pairing: Pairing, measure: Measure) -> PairVerdict:
    """Run the rounds, and check of each that a node is in one pair only."""
    for _ in range(ROUNDS + 1):
        pairs = pairing.next_round()
        if not pairs:
            assert pairing.next_round() == []
            return pairing.verdict()
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        pairing.record(measure(pair) for pair in pairs)
    raise AssertionError("it does not end")


def judged(count: int, faults: Mapping[str, str], **options: object) -> PairVerdict:
    return finish(Pairing(names(count), **options), network(faults))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "faults", "named", "errors", "most"),
    [
        (8, {}, [], [], 1),
        (9, {}, [], [], 2),
        (8, {"n3": "slow"}, ["n3"], [], 3),
        (9, {"n3": "wrong"}, ["n3"], [], 4),
        (8, {"n3": "error"}, [], ["n3"], 3),
        (8, {"n3": "error", "n5": "slow"}, ["n5"], ["n3"], 4),
        # Few nodes: nothing is a median before each has met the others.
        (3, {"n1": "slow"}, ["n1"], [], 3),
        (4, {"n1": "slow"}, ["n1"], [], 3),
        (3, {"n1": "wrong"}, ["n1"], [], 3),
        (128, {"n3": "slow", "n99": "wrong"}, ["n3", "n99"], [], 4),
        (1000, {f"n{i}": "slow" for i in range(5)}, names(5), [], 4),
        (2, {}, [], [], 1),
        (2, {"n1": "error"}, [], ["n0", "n1"], 1),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_the_bad_are_named_and_all_others_cleared(
    count: int, faults: dict[str, str], named: list[str], errors: list[str], most: int, seed: int
) -> None:
    pairing = Pairing(names(count), seed=seed)
    verdict = finish(pairing, network(faults))
    assert (sorted(verdict.named), sorted(verdict.errors)) == (named, errors)
    assert verdict.cleared == set(names(count)) - set(named) - set(errors)
    assert not verdict.undecided
    assert pairing.rounds <= most


def test_evidence_names_partner_and_numbers() -> None:
    verdict = judged(8, {"n3": "slow", "n5": "wrong"}, seed=1)
    assert all("10 GB/s, at least 20 expected" in line for line in verdict.named["n3"])
    assert all("rank 0 got 3, not 2" in line for line in verdict.named["n5"])
    assert len(verdict.named["n3"]) >= 2
    assert verdict.median_gbps == 40.0


def test_two_bad_nodes_that_meet_first_are_both_found() -> None:
    pairing = Pairing(names(8))
    pairs = pairing.next_round()
    measure = network(dict.fromkeys(pairs[0], "slow"))
    pairing.record(measure(pair) for pair in pairs)
    assert not pairing.verdict().named, "one bad pair says nothing"
    assert set(finish(pairing, measure).named) == set(pairs[0])


@pytest.mark.parametrize(
    ("count", "faults", "options", "text"),
    [
        (2, {"n1": "wrong"}, {}, "may be the partner's fault"),
        (2, {"n1": "slow"}, {"floor_gbps": 20.0}, "may be the partner's fault"),
        (8, dict.fromkeys(names(8), "wrong"), {}, "may be the partner's fault"),
        (1000, dict.fromkeys(names(1000), "slow"), {"floor_gbps": 20.0}, "the partner's fault"),
        (
            16,
            dict.fromkeys(names(9), "slow"),
            {},
            "may be the partner's fault|two kinds of machine",
        ),
        (1, {}, {}, "no partner"),
    ],
)
def test_nobody_is_named_where_nobody_can_be(
    count: int, faults: dict[str, str], options: dict[str, float], text: str
) -> None:
    verdict = judged(count, faults, **options)
    assert not verdict.named
    assert set(verdict.undecided) >= set(faults)
    assert all(re.search(text, why) for why in verdict.undecided.values())


def test_a_floor_needs_no_median() -> None:
    assert set(judged(16, dict.fromkeys(names(4), "slow"), floor_gbps=20.0).named) == set(names(4))


@pytest.mark.parametrize("bad", [5, 9])
def test_more_than_a_quarter_are_not_named_for_speed(bad: int) -> None:
    verdict = judged(16, dict.fromkeys(names(bad), "slow"), floor_gbps=20.0)
    assert not verdict.named and set(verdict.undecided) >= set(names(bad))
    assert any("two kinds of machine" in why for why in verdict.undecided.values())
    wrong = judged(16, dict.fromkeys(names(5), "wrong"), floor_gbps=20.0)
    assert set(wrong.named) == set(names(5))


def test_round_one_stays_in_the_leaf_and_keeps_suspects_apart() -> None:
    leaf_of, suspects = leaves(64, 16), ["n1", "n2", "n17", "n40"]
    pairs = Pairing(names(64), leaf_of=leaf_of, suspects=suspects, seed=3).next_round()
    assert len(pairs) == 32
    assert all(leaf_of[one] == leaf_of[other] for one, other in pairs)
    assert not any({one, other} <= set(suspects) for one, other in pairs)


def test_a_bad_leaf_is_said_and_none_of_its_nodes_named() -> None:
    leaf_of = leaves(32, 8)
    bad = dict.fromkeys(names(8), "slow")
    verdict = finish(Pairing(names(32), leaf_of=leaf_of), network(bad, leaf_of))
    assert not verdict.named
    assert set(verdict.undecided) == set(bad)
    assert all("leaf switch l0" in why for why in verdict.undecided.values())


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_uplink_is_blamed_on_no_node(seed: int) -> None:
    """One node of each leaf is left over, and goes across."""
    leaf_of = leaves(45, 5)
    at = network({}, leaf_of)
    uplink = network(dict.fromkeys(names(5), "slow"), leaf_of)

    def measure(pair: Pair) -> PairResult:
        return (at if leaf_of[pair.one] == leaf_of[pair.other] else uplink)(pair)

    verdict = finish(Pairing(names(45), leaf_of=leaf_of, seed=seed), measure)
    assert not verdict.named
    assert set(verdict.undecided) <= set(names(5))
    assert all("uplinks" in why for why in verdict.undecided.values())


def test_one_slow_moment_names_nobody_and_one_wrong_result_is_not_forgotten() -> None:
    for fault, undecided in (("slow", 0), ("wrong", 2)):
        pairing = Pairing(names(16))
        pairs = pairing.next_round()
        bad, good = network({pairs[0].one: fault}), network({})
        pairing.record((bad if pair is pairs[0] else good)(pair) for pair in pairs)
        verdict = finish(pairing, good)
        assert not verdict.named
        assert len(verdict.undecided) == undecided
        assert all("intermittently" in why for why in verdict.undecided.values())


@st.composite
def fleets(draw: st.DrawFn, least: int, kinds: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Nodes, and what is wrong with fewer than half of them."""
    nodes = names(draw(st.integers(least, 40)))
    bad = draw(st.lists(st.sampled_from(nodes), unique=True, max_size=(len(nodes) - 1) // 2))
    return nodes, {node: draw(st.sampled_from(kinds)) for node in bad}


LEAF = st.sampled_from([0, 1, 4, 7])


@given(fleets(1, FAULTS), LEAF, st.integers(0, 9), st.data())
def test_no_healthy_node_is_ever_named(
    fleet: tuple[list[str], dict[str, str]], leaf: int, seed: int, data: st.DataObject
) -> None:
    nodes, faults = fleet
    leaf_of = leaves(len(nodes), leaf) if leaf else {}
    suspects = data.draw(st.lists(st.sampled_from(nodes)))
    options = {"leaf_of": leaf_of, "suspects": suspects, "seed": seed}
    seen: set[str] = set()

    def measure(pair: Pair) -> PairResult:
        seen.update(pair)
        return network(faults, leaf_of)(pair)

    verdict = finish(Pairing(nodes, **options), measure)  # type: ignore[arg-type]
    assert set(verdict.named) <= set(faults)
    assert seen == set(nodes) or len(nodes) == 1
    known = [*verdict.named, *verdict.cleared, *verdict.undecided, *verdict.errors]
    assert sorted(known) == sorted(nodes)
    # With a third or more of them bad, all pairs may be slow alike, which looks healthy.
    slow = {node for node, fault in faults.items() if fault == "slow"}
    assert not verdict.cleared & (set(faults) - slow)
    assert not verdict.cleared & slow or 3 * len(faults) >= len(nodes)
    assert finish(Pairing(nodes, **options), measure) == verdict  # type: ignore[arg-type]


# More than a quarter slow is another kind of machine, so 5 need 20.
@given(st.integers(20, 60), st.integers(0, 5), st.sampled_from([0, 1, 2, 8]), st.integers(0, 10**6))
def test_up_to_five_of_twenty_or_more_are_named_exactly(
    count: int, bad: int, leaf: int, seed: int
) -> None:
    chance = random.Random(seed)
    faults = {n: chance.choice(["slow", "wrong"]) for n in chance.sample(names(count), bad)}
    leaf_of = leaves(count, leaf) if leaf else {}
    pairing = Pairing(names(count), leaf_of=leaf_of, seed=seed)
    verdict = finish(pairing, network(faults, leaf_of))
    # Most nodes of a leaf: that may be the leaf.
    assert set(verdict.named) | set(verdict.undecided) == set(faults)
    assert all("most nodes of leaf" in why for why in verdict.undecided.values())
    assert verdict.cleared == set(names(count)) - set(faults)
    assert pairing.rounds <= (6 if leaf else 5)
