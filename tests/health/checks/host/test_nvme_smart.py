"""The nvme_smart family: health logs of drives, from nvme-cli or smartctl."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from typing import Any

import pytest
from fake_host import ids
from fake_system import FakeSystem
from hypothesis import given
from hypothesis import strategies as st

from health.checks.host import nvme_smart
from health.checks.host.nvme_smart import Health, parse
from health.node.system import CommandOutput

run = nvme_smart.CHECK.run
CLI = {"critical_warning": 0, "avail_spare": 100, "percent_used": 3, "media_errors": "0"}
CTL = {"critical_warning": 0, "available_spare": 99, "percentage_used": 3, "media_errors": 1}


def smartctl(log: dict[str, Any]) -> str:
    return json.dumps({"smartctl": {}, "nvme_smart_health_information_log": log})


@pytest.mark.parametrize(
    ("said", "health"),
    [
        (json.dumps(CLI), Health(0, 3, 0, 100)),
        (smartctl(CTL), Health(0, 3, 1, 99)),
        (json.dumps(CLI | {"critical_warning": {"value": 4, "nvm_subsystem": 1}}),
         Health(4, 3, 0, 100)),
        (json.dumps(CLI | {"media_errors": 2**100}), Health(0, 3, 2**100, 100)),
        ('{"critical_warning": 1}', Health(1, None, None, None)),
        (json.dumps(CLI | {"percent_used": -1, "avail_spare": True}), Health(0, None, 0, None)),
    ],
)  # fmt: skip
def test_parse(said: str, health: Health) -> None:
    assert parse(said) == health


@pytest.mark.parametrize("said", ["", "[]", "no such device", "{}", smartctl({}), "[" * 100_000])
def test_what_is_no_health_log(said: str) -> None:
    with pytest.raises(ValueError):
        parse(said)


@given(st.text(max_size=200) | st.dictionaries(st.text(), st.integers()).map(json.dumps))
def test_any_text_is_a_log_or_a_value_error(said: str) -> None:
    try:
        assert isinstance(parse(said), Health)
    except ValueError as error:
        assert str(error)


def node(
    commands: dict[tuple[str, ...], CommandOutput | OSError],
    state: str = "live",
    transport: str = "pcie",
) -> FakeSystem:
    base = "/sys/class/nvme/nvme0"
    files: dict[str, str | OSError] = {f"{base}/state": state, f"{base}/transport": transport}
    return FakeSystem(files=files, commands=commands)


NVME = ("/usr/sbin/nvme", "smart-log", "/dev/nvme0", "--output-format=json")
SMARTCTL = ("/usr/bin/smartctl", "--json", "-A", "/dev/nvme0")


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (CLI, []),
        (CLI | {"critical_warning": 1}, ["nvme-warning"]),
        (CLI | {"critical_warning": 64}, ["nvme-warning"]),  # a bit of a later standard
        (CLI | {"percent_used": 99}, []),
        (CLI | {"percent_used": 100}, ["nvme-worn"]),
        (CLI | {"media_errors": 10}, []),
        (CLI | {"media_errors": 11}, ["nvme-media-errors"]),
        ({"critical_warning": 0}, []),  # what is not told is not zero, and no finding
    ],
)
def test_what_a_drive_says(log: dict[str, Any], found: list[str]) -> None:
    system = node({NVME: CommandOutput(0, json.dumps(log), "")})
    assert ids(run(system)) == [("WARN", check, "nvme0") for check in found]


def test_the_bits_are_named() -> None:
    [finding] = run(node({NVME: CommandOutput(0, json.dumps(CLI | {"critical_warning": 12}), "")}))
    assert "0x0c: reliability degraded" in finding.evidence
    assert "read-only mode; spare 100 %" in finding.evidence


def test_smartctl_where_there_is_no_nvme_cli() -> None:
    log = CTL | {"critical_warning": 8}
    system = node({SMARTCTL: CommandOutput(4, smartctl(log), "")})
    assert ids(run(system)) == [("WARN", "nvme-warning", "nvme0")]


@pytest.mark.parametrize(
    ("answer", "evidence"),
    [
        (TimeoutError(errno.ETIMEDOUT, "timed out"), "no answer in 1 s"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied"),
        (CommandOutput(1, "", "Unable to open"), "Expecting value"),
    ],
)
def test_a_log_that_cannot_be_read_is_told(answer: CommandOutput | OSError, evidence: str) -> None:
    [finding] = run(node({NVME: answer}))
    assert (finding.check, finding.status, finding.cls) == ("nvme-smart-unread", "WARN", "tool")
    assert evidence in finding.evidence


@pytest.mark.parametrize(
    ("state", "transport"), [("dead", "pcie"), ("resetting", "pcie"), ("live", "tcp")]
)
def test_only_local_drives_that_live_are_asked(state: str, transport: str) -> None:
    system = node({NVME: TimeoutError(errno.ETIMEDOUT, "timed out")}, state, transport)
    assert run(system) == []
    assert not [asked for asked in system.asked if asked.startswith("command")]


def test_a_node_without_the_programs_or_without_drives() -> None:
    assert run(node({})) == []
    assert run(FakeSystem()) == []


def test_many_slow_drives_are_no_node_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers just in time; an overrun of the family would drain the node."""
    clock = [0.0]

    class Slow(FakeSystem):
        def command(self, argv: Sequence[str], deadline_s: float) -> CommandOutput:
            if argv[0] != NVME[0]:
                raise FileNotFoundError(argv[0])
            clock[0] += 0.9
            return CommandOutput(0, json.dumps(CLI), "")

    monkeypatch.setattr(nvme_smart.time, "monotonic", lambda: clock[0])
    files: dict[str, str | OSError] = {}
    for number in range(8):
        files[f"/sys/class/nvme/nvme{number}/state"] = "live"
    [finding] = run(Slow(files=files))
    assert (finding.check, finding.status) == ("nvme-smart-unread", "WARN")
    assert clock[0] + 1.0 < nvme_smart.CHECK.deadline_s
