"""Whose a drain is, and whether it may be taken back. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from fake_system import BOOT

from health.finding import LADDER, ActionName
from health.gate.undrain import HARMLESS, NEAR_S, DrainStanding, lifted_by_others, ours, why_not
from health.node.system import Event

NOW = 2_000_000.0


def reason(action: str = "reboot", check: str = "xid-79", device: str = "gpu3") -> str:
    return f"robust:node:{check}:{device}:{action}:job7"


def drained(action: str = "reboot", at: float = NOW - 1000, boot: str = BOOT, **more: Any) -> Event:
    return Event(at, "drain", boot, {"reason": reason(action), "job": 7, "uid": 1000, **more})


def standing(text: str, at: float | None = NOW - 1000, *flags: str) -> DrainStanding:
    return DrainStanding({"IDLE", "DRAIN", *flags}, text, at)


@pytest.mark.parametrize(
    ("text", "events", "is_ours"),
    [
        (reason(), [drained()], True),
        (reason(), [], True),  # the record is lost; the prefix and the grammar are ours
        ("replace the fan", [drained()], False),
        (f"{reason()} ticket 4711", [drained()], False),  # edited by a person
        ("robust:node:node-lost:-:none:job7", [], True),  # robust-srun's, with drain = "direct"
        ("robust: node:crash: job7:e1", [], False),  # not our grammar
        ("robust:", [], False),
        ("", [drained()], False),
        ("Prolog error", [], False),  # another site script's
        ("Prolog error", [drained()], False),  # ours was placed: this is another one
        ("Prolog error", [drained(**{"as": "Prolog error", "placed": False})], True),
        ("Epilog error", [drained(**{"as": "Prolog error", "placed": False})], False),
        ("Prolog error", [drained(at=NOW - 9000, **{"as": "Prolog error"})], False),
        ("Prolog error", [drained(**{"as": "Prolog error", "reason": "junk"})], False),
        (f"{reason()} : reboot issued", [drained(at=NOW - 9000)], True),  # Slurm's own addition
        (f"{reason()} : reboot whenever", [], False),
        (
            "Prolog error : reboot issued",
            [drained(at=NOW - 9000, **{"as": "Prolog error", "placed": False})],
            True,
        ),
        ("Not responding", [], False),
        ("Kill task failed", [], False),
        # Slurm's own drain of an undrained node, for a reason that 24.11 kept.
        (reason(), [drained(), Event(NOW - 900, "undrain", BOOT, {})], False),
        (reason(), [Event(NOW - 900, "undrain", BOOT, {})], False),  # the record is lost
        (reason(), [drained(), Event(NOW - 900, "lifted", BOOT, {})], False),
        (reason(), [Event(NOW - 1100, "undrain", BOOT, {}), drained()], True),  # drained anew
        (reason(), [drained(), Event(NOW - 4600, "undrain", BOOT, {})], False),  # clock set back
        (
            "Prolog error",
            [drained(**{"as": "Prolog error"}), Event(NOW - 900, "undrain", BOOT, {})],
            False,
        ),
        (
            f"{reason()} : reboot issued",
            [drained(at=NOW - 9000), Event(NOW - 8000, "undrain", BOOT, {})],
            False,
        ),
    ],
)
def test_whose_a_drain_is(text: str, events: list[Event], is_ours: bool) -> None:
    assert bool(ours(standing(text), events)) == is_ours


def test_a_node_that_is_not_drained_has_no_drain_of_ours() -> None:
    assert ours(DrainStanding({"IDLE"}, reason(), NOW), [drained()]) is None


@pytest.mark.parametrize(
    ("flags", "events", "lifted"),
    [
        ({"IDLE"}, [drained(placed=True)], True),
        ({"IDLE"}, [drained(placed=False)], False),  # never stood as such
        ({"IDLE", "DRAIN"}, [drained(placed=True)], False),
        ({"IDLE"}, [drained(placed=True), Event(NOW, "undrain", BOOT, {})], False),
        ({"IDLE"}, [], False),
    ],
)
def test_a_drain_that_somebody_else_lifted(
    flags: set[str], events: list[Event], lifted: bool
) -> None:
    assert bool(lifted_by_others(flags, events)) == lifted


def test_of_several_records_the_one_of_this_drain_counts() -> None:
    old = drained(at=NOW - 90_000, boot="old")
    mine = ours(standing(reason()), [old])
    assert mine and mine.event.time == NOW - 1000 and mine.event.boot == ""
    near = drained(at=NOW - 1000 + NEAR_S / 2)
    mine = ours(standing(reason()), [old, near])
    assert mine and mine.event == near


def test_the_record_of_a_drain_is_older_than_slurms_reboot() -> None:
    drain = drained(at=NOW - 90_000, boot="old")
    mine = ours(standing(f"{reason()} : reboot issued : reboot complete"), [drain])
    assert mine and mine.event == drain


_BOOTED = NOW - 50_000  # before the drain


@pytest.mark.parametrize(
    ("action", "booted", "after", "free"),
    [
        # The rest is of ``cured``, and in test_health_state.py.
        ("none", _BOOTED, [], True),
        ("reset-gpu", _BOOTED, [("reset", "0000:3b:00.0")], True),
        ("reset-gpu", _BOOTED, [("reset", "0000:99:00.0")], False),
        ("reboot", _BOOTED, [], False),
        ("reboot", NOW - 10, [], True),
    ],
)
def test_the_proof_that_an_action_demands(
    action: ActionName, booted: float, after: list[tuple[str, str]], free: bool
) -> None:
    first = drained(action, boot=BOOT if booted < NOW - 1000 else "older")
    events = [first, *(Event(NOW - 5, kind, BOOT, {"gpu": gpu}) for kind, gpu in after)]
    stands = standing(reason(action))
    mine = ours(stands, events)
    assert mine is not None
    why = why_not(stands, mine, events, BOOT, booted, {"gpu3": "0000:3b:00.0"})
    assert (why == "") == free, why


def test_every_action_has_a_proof_that_the_tests_know() -> None:
    known = {"none", "clear-leftovers", "restart-fabric-manager", "restart-imex", "reset-gpu"}
    known |= {"reboot", "service"}
    assert {action.name for action in LADDER} == known


@pytest.mark.parametrize(
    "flag",
    ["DOWN", "FAIL", "MAINTENANCE", "REBOOT_ISSUED", "REBOOT_REQUESTED", "NOT_RESPONDING",
     "POWERED_DOWN", "POWERING_UP", "INVALID_REG", "FUTURE", "UNKNOWN", "BLOCKED", "NEW_FLAG"],
)  # fmt: skip
def test_no_node_with_another_flag(flag: str) -> None:
    stands = standing(reason("none"), NOW - 1000, flag)
    mine = ours(stands, [])
    assert mine is not None
    assert flag in why_not(stands, mine, [], BOOT, _BOOTED, {})
    assert flag not in HARMLESS
