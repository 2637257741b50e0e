"""A sequence of checks in one worker process, and their outcomes as the parent sees them.

The worker is forked when the sequence starts. If a check overruns its deadline, its worker is
killed, or left behind if the kernel holds it; a new worker runs the remaining checks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import NamedTuple

from health.check import Check
from health.children.child import DRIVER, Child, fork, where_it_hangs
from health.finding import Class, Finding, Status, worst
from health.node.stuck import Stuck
from health.node.system import System
from health.run.worker import work
from robust_slurm.text import one_line

_START_S = 2.0  # from the fork to the first check
_LINE_LIMIT = 4 << 20  # bytes: MOST_FINDINGS of one line each stay far below


class FamilyResult(NamedTuple):
    """One family: ``status`` as in Ran; ``by_runner``: the runner made the findings, no check."""

    check: Check
    ms: float
    findings: list[Finding]
    status: str
    by_runner: bool = False


def outcome(check: Check, ms: float, found: list[Finding], error: str) -> FamilyResult:
    """Return the outcome of a check that ended; an exception closes the gate as an ERROR."""
    findings = [_error(check, error)] if error else found
    return FamilyResult(check, ms, findings, worst(findings))


def _error(check: Check, text: str) -> Finding:
    return Finding("ERROR", "tool", f"{check.name}-error", "", text, "none")


def _hung(check: Check, text: str) -> Finding:
    """Blame the node only if the check hangs in a driver: a user can delay any other look."""
    status: Status = "WARN" if check.only_warns else "FAIL"
    cls: Class = "node" if f"({DRIVER} " in text else "tool"
    return Finding(status, cls, f"{check.name}-hung", "", text, "none")


class Lane:
    """Poll ``fd``, ``feed`` when it is readable, ``expire`` once ``deadline`` is over."""

    def __init__(self, system: System, checks: Sequence[Check], stuck: Stuck, limit: float):
        """``limit``: the monotonic time at which the whole run is over."""
        self.outcomes: list[FamilyResult] = []
        self.deadline = limit
        self._system = system
        self._stuck = stuck
        self._limit = limit
        self.pending: list[Check] = []  # the checks without an outcome yet, in order
        self._running = False  # the first of the pending has begun
        self._began = 0.0
        self._rest = b""
        self._child: Child | None = None
        for check in checks:
            still = stuck.still(_key(check))
            if still:
                self._seen(check, _hung(check, one_line(still)))
            else:
                self.pending.append(check)
        self._next_worker()

    @property
    def fd(self) -> int:
        return self._child.fd if self._child else -1

    @property
    def done(self) -> bool:
        return self._child is None

    def feed(self) -> None:
        """Take what the worker has written."""
        child = self._child
        if child is None:
            return
        try:
            data = child.read()
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if not self._take(line):
                self._broken("sent an invalid answer")
                return
        if not self.pending:
            self._end_worker()
        elif len(self._rest) > _LINE_LIMIT:
            self._broken("sent too much data")
        elif not data:
            code = child.ended(0.2)
            how = f"died of signal {-code}" if code is not None and code < 0 else f"ended ({code})"
            self._broken(how)

    def expire(self) -> None:
        """The running check is over its deadline."""
        if self._child is None or not self.pending:
            return
        if not self._running:
            self._broken(f"did not start it within {_START_S:g} s")
            return
        check = self.pending.pop(0)
        where = where_it_hangs(self._child.pid)
        text = f"did not finish within {check.deadline_s:g} s" + (f", {where}" if where else "")
        if not self._child.stop():
            self._stuck.remember(_key(check), self._child.pid, text)
        self._seen(check, _hung(check, text), (time.monotonic() - self._began) * 1000)
        self._end_worker()
        self._next_worker()

    def abandon(self) -> None:
        """The whole run is over: stop without waiting; what is pending has no outcome."""
        if self._child is not None:
            if not self._child.stop() and self.pending:
                where = where_it_hangs(self._child.pid)
                check = self.pending[0]
                self._stuck.remember(_key(check), self._child.pid, f"did not finish, {where}")
            self._end_worker()

    def _take(self, line: bytes) -> bool:
        """Take one line of the worker; False: it is not the one expected now."""
        check = self.pending[0] if self.pending else None
        try:
            kind, name, *values = json.loads(line)
            if check is None or name != check.name:
                return False
            if kind == "start":
                self._running = True
                self._began = time.monotonic()
                self.deadline = min(self._limit, self._began + check.deadline_s)
                return True
            ms, found, raised = values
            findings = [Finding(*fields) for fields in found]
            self.outcomes.append(outcome(check, float(ms), findings, str(raised)))
        except (ValueError, TypeError):
            return False
        self.pending.pop(0)
        self._running = False
        self.deadline = min(self._limit, time.monotonic() + _START_S)
        return True

    def _seen(self, check: Check, finding: Finding, ms: float = 0.0) -> None:
        found = FamilyResult(check, round(ms, 3), [finding], finding.status, by_runner=True)
        self.outcomes.append(found)

    def _broken(self, how: str) -> None:
        check = self.pending.pop(0)
        self._seen(check, _error(check, f"the worker {how}"))
        if self._child:
            self._child.stop()
        self._end_worker()
        self._next_worker()

    def _next_worker(self) -> None:
        if not self.pending or time.monotonic() >= self._limit:
            return
        now = time.monotonic()
        self._rest = b""
        self._running = False
        self.deadline = min(self._limit, now + _START_S)
        try:
            self._child = fork(work(self._system, tuple(self.pending)), self._limit - now)
        except OSError as err:  # no memory, too many processes
            for check in self.pending:
                self._seen(check, _error(check, f"no process for it: {err.strerror}"))
            self.pending = []

    def _end_worker(self) -> None:
        if self._child:
            self._child.stop(0.0)
            self._child.close()
            self._child = None


def _key(check: Check) -> str:
    return f"check {check.name}"
