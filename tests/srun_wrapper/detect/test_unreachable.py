"""A node that does not answer, as several observers see it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srun_wrapper.detect.unreachable import (
    FACTOR,
    NEIGHBOURS,
    REMEMBERED,
    TRIED,
    WITNESSES,
    OverdueNode,
    SilencePatience,
    choose,
    judge,
    neighbours,
)

END = 10.0
FAILED = (TRIED,) * 3


@pytest.mark.parametrize(
    ("case", "seen", "now", "verdict"),
    [
        ("nobody reaches it", OverdueNode(END, 3, FAILED), END, "lost"),
        ("not yet for long enough", OverdueNode(END, 3, FAILED), END - 0.01, "wait"),
        ("one witness is late", OverdueNode(END, 3, FAILED[:2]), END, "lost"),
        ("two are", OverdueNode(END, 3, FAILED[:1]), END, "wait"),
        ("a job of three", OverdueNode(END, 1, FAILED[:1]), END, "lost"),
        ("a job of two", OverdueNode(END, 0), END, "wait"),
        ("a single witness of many", OverdueNode(END, 9, FAILED[:1]), END, "wait"),
        ("witnesses that did not run", OverdueNode(END, 3, (TRIED - 1,) * 3), END, "wait"),
        ("a way to it is broken", OverdueNode(END, 3, FAILED[:2], reached=True), END, "reached"),
        ("… seen at once", OverdueNode(END, 3, reached=True), 0.0, "reached"),
        ("a neighbour is as silent", OverdueNode(END, 3, FAILED, unheard=1), END, "wait"),
        ("so is another node", OverdueNode(END, 3, FAILED, silent=1), END, "wait"),
    ],
)
def test_verdicts(case: str, seen: OverdueNode, now: float, verdict: str) -> None:
    assert judge(seen, now) == verdict, case


@given(
    st.builds(
        OverdueNode,
        st.just(END),
        st.integers(0, 3),
        st.lists(st.integers(0, 20), max_size=3),
        st.booleans(),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    st.floats(0, 20),
)
def test_only_what_nothing_contradicts_is_lost(seen: OverdueNode, now: float) -> None:
    if judge(seen, now) == "lost":
        assert now >= END and seen.failed and seen.able
        assert not (seen.reached or seen.unheard or seen.silent)


@given(st.integers(2, 200), st.data())
def test_who_is_asked(size: int, data: st.DataObject) -> None:
    nodes = list(range(size))
    suspect = data.draw(st.sampled_from(nodes))
    asked, near = choose(nodes, suspect), neighbours(nodes, suspect)
    assert len(set(asked)) == len(asked) == min(WITNESSES, size - 1)
    assert len(set(near)) == len(near) == min(NEIGHBOURS, size - 1)
    assert suspect not in {*asked, *near}
    distances = sorted((each - suspect) % size for each in asked)
    if size > 100:  # far from one another
        assert min(after - before for before, after in pairwise([0, *distances, size])) > size / 8
        assert max(min(d, size - d) for d in ((n - suspect) % size for n in near)) <= NEIGHBOURS


def test_a_silence_that_ended_makes_patient() -> None:
    patience = SilencePatience(0.35)
    assert patience.limit(0.0) == 0.35
    patience.note(0.1, 0.0)
    assert patience.limit(1.0) == 0.35
    patience.note(0.5, 2.0)
    patience.note(0.3, 3.0)
    assert patience.limit(4.0) == FACTOR * 0.5
    assert patience.limit(2.5 + REMEMBERED) == FACTOR * 0.3
    assert patience.limit(4.0 + REMEMBERED) == 0.35


def test_switched_off() -> None:
    patience = SilencePatience(0.0)
    patience.note(0.5, 0.0)
    assert patience.limit(0.0) == 0.0
