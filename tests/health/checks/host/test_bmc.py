"""The bmc family: chassis status and event log, from ipmitool."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from fake_host import ids
from fake_system import FakeSystem
from hypothesis import given
from hypothesis import strategies as st

from health.checks.host import bmc
from health.node.system import CommandOutput, PathEntry

NOW = 1_763_740_800.0  # 2025-11-21 16:00 UTC
TOOL = "/usr/bin/ipmitool"
WELL = "System Power         : on\nMain Power Fault     : false\nCooling/Fan Fault    : false\n"
INFO = "SEL Information\nEntries          : 512\nOverflow         : false\n"
SUPPLY = "  32 | {} | 15:02:11 | Power Supply #0x64 | Failure detected | Asserted"


def node(**answers: Any) -> FakeSystem:
    """``answers``: chassis, info, events, each a text, an Output or an error; and the device."""
    device = answers.pop("device", PathEntry("char", 0o600, 0, 0, NOW))
    texts = {"chassis": WELL, "info": INFO, "events": "SEL has no entries\n", **answers}
    commands = {}
    for key, words in (
        ("chassis", ("chassis", "status")),
        ("info", ("sel", "info")),
        ("events", ("sel", "list", "last", "20")),
    ):
        said = texts[key]
        commands[TOOL, *words] = CommandOutput(0, said, "") if isinstance(said, str) else said
    return FakeSystem(entries={"/dev/ipmi0": device} if device else {}, commands=commands, now=NOW)


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({}, []),
        ({"device": None}, []),
        ({"device": PathEntry("file", 0o600, 0, 0, NOW)}, []),
        ({"chassis": FileNotFoundError(errno.ENOENT, "none")}, []),  # no ipmitool
        ({"chassis": WELL.replace("Fault    : false", "Fault    : true")}, ["bmc-chassis"]),
        ({"chassis": "odd\n:\n"}, []),
        ({"info": INFO.replace("false", "true")}, ["bmc-log-full"]),
        ({"events": SUPPLY.format("11/21/2025")}, ["bmc-event"]),
        ({"chassis": TimeoutError(errno.ETIMEDOUT, "late")}, ["bmc-unread"]),
        ({"events": TimeoutError(errno.ETIMEDOUT, "late")}, ["bmc-unread"]),
        (
            {"chassis": CommandOutput(1, "", "Could not open device at /dev/ipmi0\n")},
            ["bmc-unread"],
        ),
        ({"chassis": PermissionError(errno.EPERM, "could be changed")}, ["bmc-unread"]),
    ],
)
def test_findings(answers: dict[str, Any], found: list[str]) -> None:
    told = bmc.CHECK.run(node(**answers))
    assert ids(told) == [("WARN", name, "") for name in found]
    assert all(condition.status == "WARN" for condition in bmc.CHECK.conditions)


def test_after_one_that_does_not_answer_no_other_is_asked() -> None:
    system = node(chassis=TimeoutError(errno.ETIMEDOUT, "late"))
    bmc.CHECK.run(system)
    assert system.asked[f"command {TOOL}"] == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SUPPLY.format("11/21/2025"), True),
        (SUPPLY.format("11/21/25"), True),  # ipmitool 1.8.19
        (SUPPLY.format("11/20/2025"), True),
        (SUPPLY.format("11/22/2025"), True),  # a BMC east of us
        (SUPPLY.format("11/19/2025"), False),
        (SUPPLY.format("Pre-Init"), False),
        (SUPPLY.format("11/21/2025").replace("Asserted", "Deasserted"), False),
        ("   7 | 11/21/2025 | 15:02:11 | Memory #0x87 | Uncorrectable ECC | Asserted", True),
        ("   7 | 11/21/2025 | 15:02:11 | Memory #0x87 | Correctable ECC | Asserted", False),
        ("   8 | 11/21/2025 | 15:02:11 | Processor #0x03 | IERR | Asserted", True),
        ("   9 | 11/21/2025 | 15:02:11 | Power Unit #0x01 | Power off/down | Asserted", False),
        ("   9 | 11/21/2025 | Thermal Trip", False),
    ],
)
def test_events(line: str, told: bool) -> None:
    assert bool(bmc.events(line + "\n", NOW)) == told


@given(st.text(max_size=200))
def test_whatever_is_printed(said: str) -> None:
    bmc.events(said, NOW)
    bmc.values(said)
