"""The answer of the active tests' process, and a node's history of such tests. Pure.

The tests run in the site's own interpreter with torch (``health/active/``). The gate does not trust
their answer: only a complete finding that agrees with the exit code closes it.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from health.active_tests import BY_NAME, TESTS
from health.check import Condition
from health.finding import ACTIONS, STATUSES, Finding
from health.node.system import CommandOutput, Event
from robust_slurm.text import ago, one_line

# "owed": not run, or not to its end, for want of time or of a free node; "partly": no fault, but
# not every test was run.
Result = Literal["passed", "failed", "broken", "owed", "partly"]
KIND = "active-run"  # of the events
BURN_IN = "burn-in"  # of those that `robust-health burn-in` writes
LEVELS = ("quick", "standard", "long")
PASSED, FAILED, UNTESTED = 0, 1, 3  # exit codes; any other is none of ours
OWED_S = 86400.0  # how long a test that could not be run is still wanted
RETRY_S = 3600.0  # between two tries of a drained node that could not be tested
_MOST = 50  # findings
_ID = re.compile(r"active-[a-z0-9-]{1,40}")
_DEVICE = re.compile(r"[A-Za-z0-9_./+-]{0,64}")
# A program that ends by one of these has met a bug of its own as often as bad hardware.
_SUSPICIOUS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE}
)

BROKEN = Condition("active-error", "WARN", "tool", "none", "an active test could not be completed")


class ActiveAnswer(NamedTuple):
    """``told``: what came of it, in one line. ``findings`` that are no FAIL close nothing.

    ``ran``: the tests that came to their end without a fault.
    """

    result: Result
    findings: tuple[Finding, ...] = ()
    told: str = ""
    ran: tuple[str, ...] = ()

    def event_data(self, level: str, why: str) -> dict[str, Any]:
        """For the history; ``why`` it was run: "accusation", "undrain", …"""
        rows = [finding.as_dict() for finding in self.findings[:5]]
        data: dict[str, Any] = {"level": level, "why": why}
        data |= {"result": self.result, "told": self.told[:300]}
        data |= {"ran": list(self.ran)} if self.ran else {}
        return data | ({"findings": rows} if rows else {})


def broken(told: str) -> ActiveAnswer:
    """The tests gave no answer: that says nothing about the node."""
    return ActiveAnswer("broken", (BROKEN.found(told[:600]),), told)


def argv(
    python: str,
    level: str,
    node: str,
    seconds: float,
    tests: Iterable[str] = (),
    config: str = "",
) -> list[str]:
    """Return the command of the tests.

    ``tests``: only these. ``config``: the site's settings, if they lie elsewhere.
    """
    from health.node.trust import starting

    words = [*starting(python), "health.active.cli", "--json", "--level", level]
    words += ["--node", node, "--limit", f"{seconds:.1f}", "--claimed"]
    return [*words, *(["--config", config] if config else []), *tests]


def answer(output: CommandOutput) -> ActiveAnswer:
    """Read the process's output and exit code as an answer about its node."""
    said = one_line((output.err.strip() or output.out.strip())[-300:])
    if output.code == -signal.SIGKILL:
        return ActiveAnswer("owed", (), "the active tests were stopped, as when a job starts")
    if output.code not in (PASSED, FAILED, UNTESTED):
        return broken(f"the active tests ended with exit code {output.code}: {said}")
    try:
        data = json.loads(output.out)
        findings, cleared, ran = _findings(data), data.get("cleared"), _ran(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return broken(f"the active tests gave an invalid answer: {error}; {said}"[:600])
    against = [one for one in findings if one.status == "FAIL"]
    if bool(against) != (output.code == FAILED):
        return broken(f"the active tests contradict their own exit code {output.code}: {said}")
    if against:
        told = "; ".join(f"{one.check}: {one.evidence}" for one in against)
        return ActiveAnswer("failed", findings, told[:300])
    if output.code == PASSED and isinstance(cleared, list) and cleared:
        return ActiveAnswer(
            "passed", findings, f"passed: {', '.join(ran)}{_left_out(data)}"[:300], ran
        )
    why = "; ".join(one.evidence for one in findings) + _left_out(data)
    told = f"not fully tested: {why.removeprefix('; ')}"[:300]
    return ActiveAnswer("broken", findings or (BROKEN.found(told),), told, ran)


def _left_out(data: Mapping[str, Any]) -> str:
    left = data.get("left_out")
    return f"; skipped: {one_line('; '.join(map(str, left)))}" if isinstance(left, list) else ""


def _ran(data: Mapping[str, Any]) -> tuple[str, ...]:
    """Our own tests that ran to their end without a fault; none if any result is undecided."""
    rows = data.get("measured", [])
    if any(row["check"] == "active-undecided" for of in data["findings"].values() for row in of):
        return ()
    bad = {row["test"] for row in rows if row.get("error") or row.get("wrong")}
    return tuple(sorted({row["test"] for row in rows}.intersection(BY_NAME) - bad))


def _findings(data: Any) -> tuple[Finding, ...]:
    """Return the findings, by whatever name of the node: the process tested this one.

    Raises ValueError, TypeError or KeyError.
    """
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
    evidence = one_line(str(row["evidence"]))
    if status == "FAIL" and cls == "node":
        return Finding("FAIL", "node", check, device, evidence, action)
    # Any other finding proves nothing: no reason to drain the node, and none to undrain it.
    return Finding("PASS" if status == "PASS" else "WARN", "tool", check, device, evidence, "none")


# -- what the history says --------------------------------------------------------------------


def owed(events: Iterable[Event], now: float) -> str:
    """The reason that a test is still due here; "" if none is."""
    mine = [e for e in events if e.kind == KIND and now - OWED_S < e.time <= now]
    last = max(mine, key=lambda event: event.time, default=None)
    if last is None or last.data.get("result") != "owed":
        return ""
    return one_line(str(last.data.get("why", "")), 60) or "owed"


def applying(gpus: bool) -> frozenset[str]:
    """The tests that a single node can run, with GPUs or without."""
    of = TESTS if gpus else [test for test in TESTS if "cuda" not in test.needs]
    return frozenset(test.name for test in of if "peer" not in test.needs)


def passed_since(events: Iterable[Event], level: str, since: float) -> frozenset[str]:
    """The tests passed at this level, or a higher one, after ``since`` (wall clock)."""
    found: set[str] = set()
    for event in events:
        ran = event.data.get("ran")
        if event.time > since and _passes(event, level) and isinstance(ran, list):
            found.update(name for name in ran if isinstance(name, str))
    return frozenset(found)


def _passes(event: Event, level: str) -> bool:
    of = event.data.get("level")
    if of not in LEVELS or LEVELS.index(of) < LEVELS.index(level):
        return False
    if event.kind == KIND:
        return event.data.get("result") in ("passed", "partly")
    return event.kind == BURN_IN and event.data.get("ok") is True


def lately_broken(events: Iterable[Event], since: float, now: float) -> str:
    """The error of a recent test before an undrain that is too early to repeat; else ""."""
    for event in events:
        data, age_s = event.data, now - event.time
        if (event.kind, data.get("why"), data.get("result")) != (KIND, "undrain", "broken"):
            continue
        if event.time > since and 0 <= age_s < RETRY_S:
            told = one_line(str(data.get("told", "")))
            return f"tried {ago(event.time, now)} (at most once an hour): {told}"
    return ""


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
