"""The naming of those who gave other bits than everybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from health.active.judging.alignment import Alignment, deviants
from health.active_tests import Measured

A, B, C = "a" * 64, "b" * 64, "c" * 64
KEY = "dense/cpu/x86_64/2.13.0"


def run(nodes: Mapping[str, str | Sequence[str]], key: str = KEY) -> list[Measured]:
    """One result for each node and device: a letter each, of which the digest is made."""
    return [
        Measured("bitwise", node, f"gpu{index}", digests={key: letter * 64})
        for node, letters in nodes.items()
        for index, letter in enumerate(letters)
    ]


@pytest.mark.parametrize(
    ("nodes", "reference", "named", "undecided"),
    [
        # A strict majority of nodes.
        ({"n1": "a", "n2": "a", "n3": "b"}, None, {"n3"}, set()),
        ({"n1": "a", "n2": "a", "n3": "a"}, None, set(), set()),
        ({"n1": "a", "n2": "a", "n3": "a", "n4": "b", "n5": "c"}, None, {"n4", "n5"}, set()),
        # No majority.
        ({"n1": "a", "n2": "b"}, None, set(), {"n1", "n2"}),
        ({"n1": "a", "n2": "b", "n3": "c"}, None, set(), {"n1", "n2", "n3"}),
        ({"n1": "a", "n2": "a", "n3": "b", "n4": "b"}, None, set(), {"n1", "n2", "n3", "n4"}),
        # One node alone, nothing to compare with.
        ({"n1": "a"}, None, set(), set()),
        ({"n1": "aaaaaaaa"}, None, set(), set()),
        # The reference decides a tie.
        ({"n1": "a", "n2": "b"}, A, {"n2"}, set()),
        ({"n1": "a", "n2": "a", "n3": "b", "n4": "b"}, B, {"n1", "n2"}, set()),
        ({"n1": "b"}, A, set(), {"n1"}),  # a device alone: another library, for all we know
        ({"n1": "a"}, A, set(), set()),
        # A reference that nobody gave is of other software, as is a whole run against it.
        ({"n1": "a", "n2": "b"}, C, set(), {"n1", "n2"}),
        ({"n1": "bbbb"}, A, set(), {"n1"}),
        ({"n1": "b", "n2": "b", "n3": "b"}, A, set(), set()),
        ({"n1": "b", "n2": "b"}, A, set(), {"n1", "n2"}),
        ({"n1": "b", "n2": "b", "n3": "a"}, A, set(), {"n1", "n2", "n3"}),
        # Devices of one node differ among themselves.
        ({"n1": "aaab"}, None, {"n1"}, set()),
        ({"n1": "ab"}, None, {"n1"}, set()),
        ({"n1": "abc"}, None, set(), {"n1"}),
        ({"n1": "aabb"}, A, {"n1"}, set()),
        ({"n1": "aa", "n2": "ab", "n3": "aa"}, None, {"n2"}, set()),
        ({"n1": "aa", "n2": "ab"}, None, {"n2"}, set()),
        ({"n1": "ab", "n2": "ab"}, None, set(), {"n1", "n2"}),
        ({"n1": "ab", "n2": "ac", "n3": "aa", "n4": "aa"}, None, set(), {"n1", "n2", "n3", "n4"}),
    ],
)
def test_who_is_named(
    nodes: dict[str, str], reference: str | None, named: set[str], undecided: set[str]
) -> None:
    found = deviants(run(nodes), {KEY: reference} if reference else {})
    assert (set(found.named), set(found.undecided)) == (named, undecided)


def test_the_evidence_shows_both_digests_and_who_gave_the_right_one() -> None:
    found = deviants(run({"n1": "a", "n2": "a", "n3": "a", "n4": "b"}))
    assert found.named["n4"] == (
        "dense/cpu/x86_64/2.13.0: bbbbbbbbbbbb against aaaaaaaaaaaa of 3 of 4 nodes (n1,n2,n3)",
    )
    assert set(found.named) == {"n4"} and not found.undecided


def test_the_evidence_names_the_device() -> None:
    assert (
        "gpu3 of 4 devices" in deviants(run({"n1": "aaab", "n2": "aa", "n3": "a"})).named["n1"][0]
    )
    assert "gpu3 gave other bits than its 3 other" in deviants(run({"n1": "aaab"})).named["n1"][0]


def test_keys_are_compared_each_for_itself() -> None:
    both = run({"n1": "a", "n2": "a", "n3": "b"}) + run({"n3": "c", "n4": "c", "n5": "c"}, "moe")
    found = deviants(both)
    assert set(found.named) == {"n3"} and not found.undecided


def test_a_result_with_an_error_has_no_say() -> None:
    bad = [one._replace(error="timed out") for one in run({"n3": "b", "n4": "b", "n5": "b"})]
    assert deviants(run({"n1": "a", "n2": "a"}) + bad) == deviants(run({"n1": "a", "n2": "a"}))


def test_a_device_that_contradicts_itself_is_named_and_has_no_say() -> None:
    wrong = Measured("bitwise", "n1", "gpu0", digests={KEY: B}, wrong=("step 2 differs",))
    found = deviants([wrong, *run({"n2": "a", "n3": "a"})])
    assert found.named == {"n1": ("gpu0: step 2 differs",)}
    assert not found.undecided


def test_the_same_device_asked_twice_with_two_answers_is_named() -> None:
    twice = [*run({"n1": "a"}), *run({"n1": "b"})]
    assert set(deviants(twice).named) == {"n1"}


def test_a_test_that_contradicts_itself_everywhere_is_at_fault_itself() -> None:
    everywhere = [Measured("bitwise", f"n{i}", "cpu", wrong=("differs",)) for i in range(3)]
    found = deviants(everywhere)
    assert not found.named and set(found.undecided) == {"n0", "n1", "n2"}
    one_is_fine = [*everywhere, Measured("bitwise", "n3", "cpu", digests={KEY: A})]
    assert set(deviants(one_is_fine).named) == {"n0", "n1", "n2"}


_LETTERS = st.text("abc", min_size=1, max_size=4)


@given(st.dictionaries(st.sampled_from(["n1", "n2", "n3", "n4", "n5"]), _LETTERS), st.data())
def test_the_order_does_not_matter_and_agreement_never_names(
    nodes: dict[str, str], data: st.DataObject
) -> None:
    reference = data.draw(st.sampled_from([{}, {KEY: A}, {KEY: C}]))
    measured = run(nodes)
    found: Alignment = deviants(measured, reference)
    assert deviants(data.draw(st.permutations(measured)), reference) == found
    assert not set(found.named) & set(found.undecided)
    if len({letter for letters in nodes.values() for letter in letters}) == 1:
        assert not found.named


def test_digests_of_any_test_are_compared() -> None:
    products = [one._replace(test="gemm") for one in run({"n1": "a", "n2": "a", "n3": "b"}, "gemm")]
    assert set(deviants(products).named) == {"n3"}
