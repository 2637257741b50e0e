"""The epilog's words on leftovers that it could not clear."""

from __future__ import annotations

import time
from typing import Any

import pytest
from job_leftovers import clear, proc

from health.leftovers import cleanup, processes
from health.leftovers.processes import Process


def left(*rows: Process, driver: list[int] | None = None) -> Any:
    said = {"ended": 0, "left": list(rows), "gone": True, "looked": 0.0, "driver": driver or []}
    return lambda *_: said


def test_what_stays_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [proc(4), proc(5)._replace(state="D", name="cat\x1b[2J")]
    monkeypatch.setattr(cleanup, "end_leftovers", left(*rows, driver=[5]))
    found = clear().findings
    assert [(f.status, f.cls, f.check, f.action) for f in found] == [
        ("FAIL", "node", "leftover-processes-stuck", "reboot"),
        ("FAIL", "user", "leftover-processes", "clear-leftovers"),
    ]
    assert found[0].evidence == "left after SIGKILL: 5 (cat?[2J) state D"


def test_what_no_driver_holds_wants_no_reboot(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [proc(4)._replace(state="D"), proc(5)._replace(state="D")]
    monkeypatch.setattr(cleanup, "end_leftovers", left(*rows, driver=[4]))
    assert [(f.check, f.cls, f.action) for f in clear().findings] == [
        ("leftover-processes-stuck", "node", "reboot"),
        ("leftover-processes-stuck", "user", "none"),
    ]


def test_a_hung_look_drains_for_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with memory of its own FUSE mount can hold a reader of /proc up."""
    monkeypatch.setattr(processes, "scan", lambda *_: time.sleep(60))
    began = time.monotonic()
    (found,) = clear(deadline_s=0.3).findings
    assert (found.check, found.status) == ("cleanup-hung", "FAIL")
    assert (found.cls, found.action) == ("user", "none")
    assert time.monotonic() - began < 5


def test_our_own_bug_is_the_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "scan", lambda *_: 1 / 0)
    (found,) = clear().findings
    assert (found.check, found.status, found.cls) == ("cleanup-error", "ERROR", "tool")
    assert "ZeroDivisionError" in found.evidence


@pytest.mark.parametrize(("others", "found"), [(False, [7]), (True, [])])
def test_no_driver_is_blamed_while_anybody_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, others: bool, found: list[int]
) -> None:
    monkeypatch.setattr(cleanup, "_text", lambda path: "nvidia_close")
    monkeypatch.setattr(cleanup, "others_wait", lambda: others)
    assert cleanup._in_driver([Process(7, 1, 1003, 1, "D", "python3")]) == found
