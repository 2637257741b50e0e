"""The order of events where a clock was set back, or was years ahead."""

from __future__ import annotations

import pytest

from health.gate.holds import settled
from health.gate.undrain import lifted_by_others
from health.history.cures import cured
from health.history.order import in_order, newest, since
from health.node.system import Event

NOW = 2e9
DRAIN = Event(NOW, "drain", "b", {"placed": True})


def did(kind: str, at: float, boot: str = "b") -> Event:
    return Event(NOW + at, kind, boot, {})


@pytest.mark.parametrize(
    ("events", "running", "after"),
    [
        ([DRAIN, did("repaired", 5)], "b", [5]),
        ([did("repaired", -5), DRAIN], "b", []),
        ([DRAIN, did("repaired", -3590)], "b", [-3590]),  # the clock was set back
        ([did("repaired", 9e8), DRAIN], "b", []),  # it was 28 years ahead
        ([DRAIN, did("driver", -5)], "b", []),  # a message from before, written down later
        ([DRAIN, did("driver", 5)], "b", [5]),
        ([DRAIN, did("repaired", -3590, "")], "b", []),  # by another node: only its clock is known
        ([DRAIN, did("repaired", 5, "")], "b", [5]),
        ([DRAIN, did("reset", -3590, "c")], "c", [-3590]),  # after the reboot
        ([did("reset", 9e8, "a"), DRAIN], "b", []),
        ([did("reset", 5, "a")], "c", [5]),
    ],
)
def test_what_came_since(events: list[Event], running: str, after: list[float]) -> None:
    assert [event.time - NOW for event in since(events, DRAIN, running)] == after


def test_a_repair_counts_although_the_clock_was_set_back() -> None:
    events = [DRAIN, did("repaired", -3590)]
    assert cured("service", "", DRAIN, events, "b", NOW - 9e5) == ""
    assert settled(DRAIN, events)
    assert cured("service", "", DRAIN, [did("repaired", 9e8), DRAIN], "b", NOW - 9e5) != ""


def test_an_undrain_is_not_anothers_although_the_clock_was_set_back() -> None:
    assert lifted_by_others({"IDLE"}, [DRAIN, did("undrain", -3500)]) is None
    assert lifted_by_others({"IDLE"}, [did("undrain", 9e8), DRAIN]) == DRAIN
    ahead = DRAIN._replace(time=NOW + 9e8, boot="a")  # 28 years, in an earlier boot
    assert lifted_by_others({"IDLE"}, [did("lifted", 5), ahead], "b") is None, "told once"
    assert lifted_by_others({"IDLE"}, [did("lifted", 5), ahead]) == ahead


def test_order_and_newest() -> None:
    events = [did("drain", 9e8), did("undrain", 0), did("drain", 1, "c")]
    assert in_order(events) == [events[2], *events[:2]]
    assert newest(events[:2]) == events[1] and newest([]) is None
