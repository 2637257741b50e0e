"""The state of a plan between two steps: it survives JSON, and others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_steps import lanes_of, rules, run

from robust_slurm.data.errors import DataError
from robust_slurm.data.planning.state import from_plain, to_plain


def test_steps_are_a_function_of_the_state_and_it_survives_json() -> None:
    lengths = {"a": lanes_of(1, 3, 40, 100), "b": lanes_of(2, 1, 70, 30)}
    steps = run(rules(), lengths, 20)
    assert any(step.state.carried for step in steps)
    for step in steps[:-1]:
        plain = json.loads(json.dumps(to_plain(step.state, {"seed": 1})))
        state = from_plain(plain, {"seed": 1}, {"a": 3, "b": 1})
        assert state == step.state
        assert run(rules(), lengths, 1, state) == [steps[step.number + 1]]


def a_state() -> dict[str, Any]:
    lengths = {"a": lanes_of(1, 3, 40, 100), "b": lanes_of(2, 1, 70, 30)}
    state = next(s.state for s in run(rules(), lengths, 20) if s.state.carried)
    return to_plain(state, {"seed": 1, "sources": {"a": {"files": "x"}}})


FOREIGN: list[tuple[tuple[Any, ...], Any, str]] = [
    (("version",), 1, "has version 1, known is 2"),
    (("plan", "seed"), 2, "another plan: seed is '2' in the state and 1 here"),
    (("plan", "sources", "a", "files"), "y", "sources.a.files is 'y' in the state and 'x' here"),
    (("plan", "sources", "z"), {}, "sources.z is only in the state"),
    (("plan",), None, "plan is None"),
    (("sources", "a"), None, "source a has no lanes"),
    (("sources",), {"a": 1}, "does not name the plan's sources"),
    (("sources", "a", "lanes"), [[0, 0, 0]], "source a has 1 lanes"),
    (("sources", "a", "lanes", 0), [0, 0], "source a: "),
    (("sources", "a", "lanes", 0), [0, 0, -1], "source a: '-1'"),
    (("sources", "a", "lanes", 0), [0, 0, True], "source a: 'True'"),
    (("sources", "a", "turn"), 3, "turn or credit"),
    (("sources", "a", "credit"), 0.5, "turn or credit"),
    (("step",), "7", "step: '7'"),
    (("step",), 1 << 70, "step: "),
    (("carried",), {}, "carried is no list"),
    (("carried", 0), [1], "carried: "),
    (("carried", 0, 0), 9, "no such source or lane"),
    (("carried", 0, 1), 9, "no such source or lane"),
    (("carried", 0, 6), None, "carried: 'None'"),
]


@pytest.mark.parametrize(("path", "value", "why"), FOREIGN)
def test_a_foreign_or_damaged_state_is_refused(path: Any, value: Any, why: str) -> None:
    plain = a_state()
    place = plain
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(DataError) as error:
        from_plain(plain, {"seed": 1, "sources": {"a": {"files": "x"}}}, {"a": 3, "b": 1})
    assert why in str(error.value)


KEYS = st.sampled_from(["version", "plan", "step", "sources", "carried", "lanes", "a"])


GARBAGE = st.recursive(
    st.none() | st.integers(0, 2), lambda c: st.lists(c, max_size=3) | st.dictionaries(KEYS, c)
)


@settings(deadline=None, max_examples=50)
@given(GARBAGE)
def test_no_garbage_does_anything_else(plain: Any) -> None:
    with pytest.raises(DataError):
        from_plain(plain, {}, {"a": 1})
