"""Faults that come back after their cure need a harder one."""

from __future__ import annotations

import pytest
from node_events import GPU, did, faults, state, xid

from health.history.state import DAY
from health.node.system import Event


def back(code: int, cures: str, base: str = "now") -> list[Event]:
    """The fault again and again, with a reset (r) or a boot (b) after each but the last."""
    events, boots = [], cures.count("b")
    ago = 3600.0 * (len(cures) + 1)
    for cure in [*cures, ""]:
        boot = base if not boots else f"boot -{boots}"
        events.append(xid(code, ago, boot=boot))
        if cure == "r":
            events.append(did("reset", ago - 1800, boot, gpu=GPU))
        boots -= cure == "b"
        ago -= 3600.0
    return events


@pytest.mark.parametrize(
    ("code", "cures", "action"),
    [
        (119, "", "reset-gpu"),
        (119, "r", "reset-gpu"),
        (119, "rr", "reboot"),
        (119, "rb", "reboot"),
        (119, "rrb", "reboot"),
        (119, "rrbb", "service"),
        (79, "", "reboot"),
        (79, "b", "reboot"),
        (79, "bb", "service"),
        (31, "bbbb", None),
    ],
)
def test_what_comes_back_climbs_the_ladder(code: int, cures: str, action: str | None) -> None:
    found = faults(*back(code, cures))
    assert [a for _, a in found] == ([action] if action else [])


def test_the_same_fault_has_several_numbers() -> None:
    events = [xid(48, 9000), did("reset", 8000, gpu=GPU), xid(95, 7000)]
    events += [did("reset", 6000, gpu=GPU), xid(64, 5000)]
    assert faults(*events) == [("xid-64", "reboot")]
    assert faults(*events[:-1], xid(119, 5000)) == [("xid-119", "reset-gpu")]


def test_what_came_back_long_ago_is_forgotten() -> None:
    events = [xid(119, 20 * DAY), did("reset", 19 * DAY, gpu=GPU)]
    events += [xid(119, 18 * DAY), did("reset", 17 * DAY, gpu=GPU), xid(119)]
    assert faults(*events) == [("xid-119", "reset-gpu")]
    assert faults(*events, return_days=30.0) == [("xid-119", "reboot")]


def test_a_fault_that_needs_service_does_not_go_away_by_a_boot() -> None:
    events = [event._replace(boot=event.boot.replace("now", "last")) for event in back(79, "bb")]
    assert faults(*events) == [("xid-79", "service")]
    assert faults(*events, did("repaired", 60)) == []


def test_many_reboots_for_a_cause_mean_service() -> None:
    drains = [did("drain", n * DAY, f"b{n}", action="reboot", check="mce") for n in (5, 3, 1)]
    assert "3 reboots" in state(*drains).reboots
    assert state(*drains).action == "service"
    assert not state(*drains[:2]).reboots
    assert not state(*drains, reboots=3).reboots
    assert not state(*drains, return_days=4.0).reboots
    assert not state(*[d._replace(data={"action": "none"}) for d in drains]).reboots
    assert not state(*[d._replace(boot="b") for d in drains]).reboots
    assert not state(*drains, did("repaired", 60)).reboots
    mixed = [*drains[:2], xid(79, DAY, boot="b1")]
    assert state(*mixed).reboots
