"""Laws of a node's state that hold whatever its events are (properties)."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from node_events import GPU, NOW, OTHER, TEXT_154, did, strike, xid

from health.finding import LADDER, rung
from health.history.state import DAY, NodeState, StateRules, escalate, node_state
from health.node.system import Event

codes = st.sampled_from([13, 31, 45, 48, 54, 63, 74, 79, 94, 95, 119, 154, 163, 9999])
gpus = st.sampled_from([GPU, OTHER])
boots = st.sampled_from(["b1", "b2", "now"])
ages = {"b1": 20 * DAY, "b2": 10 * DAY, "now": DAY}


@st.composite
def any_event(draw: st.DrawFn) -> Event:
    boot = draw(boots)
    ago = ages[boot] - draw(st.integers(0, 20)) * 100.0
    kind = draw(
        st.sampled_from(["xid", "xid", "xid", "lost", "reset", "driver", "drain", "strike"])
    )
    if kind == "xid":
        text = TEXT_154.format(draw(st.integers(0, 6)))
        return xid(draw(codes), ago, draw(gpus), text, boot=boot)
    data = {"gpu": draw(gpus), "form": "bus", "action": draw(st.sampled_from(["reboot", "none"]))}
    return did(kind, ago, boot, job=draw(st.integers(1, 4)), uid=draw(st.integers(1, 3)), **data)


def worst(found: NodeState) -> int:
    return rung(found.action)


@given(st.lists(any_event(), max_size=14), st.randoms())
def test_the_order_of_reading_does_not_matter(events: list[Event], random: Any) -> None:
    first = node_state(events, NOW, "now")
    random.shuffle(events)
    assert node_state(events, NOW, "now") == first


@given(st.lists(any_event(), max_size=14))
def test_a_later_reboot_or_reset_never_makes_it_worse(events: list[Event]) -> None:
    before = node_state(events, NOW, "now", rules=StateRules(reboots=99))
    for later in (did("reset", 1, gpu=""), did("driver", 1), did("repaired", 1)):
        assert worst(
            node_state([*events, later], NOW, "now", rules=StateRules(reboots=99))
        ) <= worst(before)
    after = node_state(events, NOW, "next boot", rules=StateRules(reboots=99))
    assert worst(after) <= worst(before)
    assert all(fault.action == "service" for fault in after.faults)


@given(st.lists(any_event(), max_size=10), st.integers(1, 9), st.integers(1, 9))
def test_strikes_never_make_it_better(events: list[Event], job: int, uid: int) -> None:
    before = node_state(events, NOW, "now")
    after = node_state([*events, strike(job, uid)], NOW, "now")
    assert worst(after) >= worst(before)
    assert after.faults == before.faults


@given(st.sampled_from([a.name for a in LADDER]), st.lists(st.sampled_from(["reset", "boot"])))
def test_to_come_back_never_makes_the_action_milder(action: Any, cures: list[str]) -> None:
    assert rung(escalate(action, cures, StateRules())[0]) >= rung(action)
    for more in ("reset", "boot"):
        assert rung(escalate(action, [*cures, more], StateRules())[0]) >= rung(
            escalate(action, cures, StateRules())[0]
        )
