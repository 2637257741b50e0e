"""What the active tests' process answers, and what a node's history says of such tests. Pure.

The tests run in the site's own interpreter with torch (``health/active/``); the gate takes their
answer for data: only a finding that is whole, and agrees with the exit code, closes it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from health.check import Condition
from health.finding import ACTIONS, STATUSES, Finding
from health.system import Event, Output

# "owed": not run, or not to its end, for want of time or of a free node.
Result = Literal["passed", "failed", "broken", "owed"]
KIND = "active-run"  # of the events
BURN_IN = "burn-in"  # of those that `robust-health burn-in` writes
LEVELS = ("quick", "standard", "long")
PASSED, FAILED, UNTESTED = 0, 1, 3  # exit codes; any other is none of ours
OWED_S = 86400.0  # how long a test that could not be run is still wanted
_MOST = 50  # findings
_ID = re.compile(r"active-[a-z0-9-]{1,40}")
_DEVICE = re.compile(r"[A-Za-z0-9_./+-]{0,64}")
# A program's own end by these is as often bad hardware as a bad program.
_SUSPICIOUS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)

BROKEN = Condition(
    "active-error", "WARN", "tool", "none", "an active test could not be run to an answer"
)


class Answer(NamedTuple):
    """``told``: what came of it, in one line. ``findings`` that are no FAIL close nothing."""

    result: Result
    findings: tuple[Finding, ...] = ()
    told: str = ""

    def event_data(self, level: str, why: str) -> dict[str, Any]:
        """For the history; ``why`` it was run: "accusation", "undrain", …"""
        rows = [finding.as_dict() for finding in self.findings[:5]]
        data = {"level": level, "why": why, "result": self.result, "told": self.told[:300]}
        return data | ({"findings": rows} if rows else {})


def broken(told: str) -> Answer:
    """The tests gave no answer: that says nothing about the node."""
    return Answer("broken", (BROKEN.found(told[:600]),), told)


def argv(python: str, level: str, node: str, seconds: float) -> list[str]:
    """Isolated: nothing of anybody's environment or directories is imported."""
    words = [python, "-I", "-m", "health.active.test_cli", "--json", "--level", level]
    return [*words, "--node", node, "--limit", f"{seconds:.1f}"]


def answer(output: Output) -> Answer:
    """What the process found out about its node."""
    said = _printable((output.err.strip() or output.out.strip())[-300:])
    if output.code == -signal.SIGKILL:
        return Answer("owed", (), "the active tests were ended, as for a job that begins")
    if output.code not in (PASSED, FAILED, UNTESTED):
        return broken(f"the active tests ended with exit code {output.code}: {said}")
    try:
        data = json.loads(output.out)
        findings, cleared = _findings(data), data.get("cleared")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return broken(f"the active tests' answer is not understood: {error}; {said}"[:600])
    against = [one for one in findings if one.status == "FAIL"]
    if bool(against) != (output.code == FAILED):
        return broken(f"the active tests contradict their own exit code {output.code}: {said}")
    if against:
        told = "; ".join(f"{one.check}: {one.evidence}" for one in against)
        return Answer("failed", findings, told[:300])
    if output.code == PASSED and isinstance(cleared, list) and cleared:
        return Answer("passed", findings, "every active test passed")
    why = [one.evidence for one in findings] or [_printable(str(data.get("left_out", "")))]
    told = f"not tested to the end: {'; '.join(why)}"[:300]
    return Answer("broken", findings or (BROKEN.found(told),), told)


def _findings(data: Any) -> tuple[Finding, ...]:
    """Of whatever node they are: the process looked at this one. ValueError and the like."""
    rows = [row for rows in data["findings"].values() for row in rows]
    if len(rows) > _MOST:
        raise ValueError(f"{len(rows)} findings")
    found = [_finding(row) for row in rows]
    return tuple(one for one in found if one.status != "PASS")


def _finding(row: Mapping[str, Any]) -> Finding:
    check, action, device = str(row["check"]), row["action"], str(row["device"])
    status, cls = row["status"], row["class"]
    known = status in STATUSES and cls in ("node", "user", "tool") and action in ACTIONS
    if not known or not _ID.fullmatch(check) or not _DEVICE.fullmatch(device):
        raise ValueError(f"not a finding of an active test: {str(row)[:120]}")
    evidence = _printable(str(row["evidence"]))[:600]
    if status == "FAIL" and cls == "node":
        return Finding("FAIL", "node", check, device, evidence, action)
    # All else says that a test could not tell: no reason to drain, none to undrain.
    return Finding("PASS" if status == "PASS" else "WARN", "tool", check, device, evidence, "none")


def _printable(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


# -- what the history says --------------------------------------------------------------------


def owed(events: Iterable[Event], now: float) -> str:
    """Why a test is still to be run here; "" if none is."""
    mine = [e for e in events if e.kind == KIND and now - OWED_S < e.time <= now]
    last = max(mine, key=lambda event: event.time, default=None)
    if last is None or last.data.get("result") != "owed":
        return ""
    return _printable(str(last.data.get("why", "")))[:60] or "owed"


def passed_since(events: Iterable[Event], level: str, since: float) -> bool:
    """Whether the node passed this level, or a higher one, after ``since`` (wall clock)."""
    return any(event.time > since and _passes(event, level) for event in events)


def _passes(event: Event, level: str) -> bool:
    of = event.data.get("level")
    if of not in LEVELS or LEVELS.index(of) < LEVELS.index(level):
        return False
    if event.kind == KIND:
        return event.data.get("result") == "passed"
    return event.kind == BURN_IN and event.data.get("ok") is True


def suspicious(env: Mapping[str, str]) -> str:
    """The signal that ended the job or a step, if it is one that bad hardware causes; or ""."""
    for name in ("SLURM_JOB_EXIT_CODE", "SLURM_JOB_DERIVED_EC"):
        text = env.get(name, "")
        if not (text.isascii() and text.isdigit() and len(text) < 10):
            continue
        status = int(text)  # as wait(2) gives it; a shell says 128 + signal as an exit code
        for number in (status & 0x7F, (status >> 8 & 0xFF) - 128):
            if number in _SUSPICIOUS:
                return signal.Signals(number).name
    return ""
