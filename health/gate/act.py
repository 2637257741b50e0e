"""Drain this node once, within the circuit breaker's limits; others' drain reasons stay.

Used only when the gate is closed: only then is the client of Slurm imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from health.finding import rung
from health.gate.breaker import HARD_CAUSE, SHARED, USER, Drain, DrainLimits, allowed
from health.gate.holds import HoldRules, service
from health.gate.reserve import Permission, fleet_size, reserve, withdraw
from health.gate.slurms_records import TICK_S, SlurmsRecords, cause
from health.history.job_notes import notes
from health.node.proctable import account
from health.node.silent import call_on
from health.node.system import Event, System
from health.settings import PLACES, Settings
from robust_slurm.drain_reason import parse_reason

if TYPE_CHECKING:
    from health.history.node_reports import AcceptedReport
    from robust_slurm.slurm import Slurm, SlurmNode

Door = Callable[[float], "Slurm"]  # a way to Slurm whose calls end within so many seconds
LEDGER_S = 1.5  # for the reservation, on a file system that may be dead


class DrainOutcome(NamedTuple):
    """The result of a drain. All empty: it was not placed, for a reason that is not known."""

    drained: bool = False  # a reason of ours stands
    bound: str = ""  # the limit of the circuit breaker that forbade it
    kept: str = ""  # another's drain reason, which stays
    error: str = ""  # why the request to Slurm failed
    stood: bool = False  # the node was drained before: nothing was done
    note: str = ""  # why there was no reservation
    reason: str = ""  # the reason that was placed instead of the given one
    why: str = ""  # why it was replaced

    def __str__(self) -> str:
        if self.bound:
            return f"NOT drained, the circuit breaker is at its limit: {self.bound}"
        if self.kept:
            return f"not drained: already drained for another reason: {self.kept}"
        if self.stood:
            return "is drained already"
        if not self.drained:
            return f"not drained: {self.error}"
        said = f"drained as {self.reason}: {self.why}" if self.reason else "drained"
        return f"{said} (limits counted in Slurm's own records: {self.note})" if self.note else said


def limits_of(settings: Settings) -> DrainLimits:
    return DrainLimits(**{key: settings.breaker[key] for key in DrainLimits._fields})


def rules_of(settings: Settings) -> HoldRules:
    return HoldRules(**{key: settings.breaker[key] for key in HoldRules._fields})


def open_door(settings: Settings) -> Door:
    """The way to Slurm's own commands, which need a PATH that slurmd does not give."""

    def door(deadline_s: float) -> Slurm:
        from health.node.trust import slurm_path
        from robust_slurm.slurm import Slurm

        own = str(settings.gate["slurm_bin"])
        os.environ["PATH"], holes = slurm_path(f"{own}:{PLACES}" if own else PLACES)
        for hole in holes:
            _say(f"Slurm's commands there are not run: {hole}")
        return Slurm(deadline_s=max(0.1, deadline_s))

    return door


def _say(text: str) -> None:
    from robust_slurm.text import shown

    os.write(2, f"robust: {shown(text)}\n".encode(errors="backslashreplace"))


class Drainer:
    """One node that is to be drained, at most until ``until`` (monotonic seconds)."""

    def __init__(
        self,
        settings: Settings,
        system: System,
        until: float,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._system = system
        self._until = until
        self._open = open_door(settings)
        self._pause = pause
        self._limits = limits_of(settings)

    def drain(self, reason: str, uid: int = -1) -> DrainOutcome:
        """Drain the context's node for ``reason``. Never raises for what Slurm or a disk does.

        ``uid``: the user whose doing it is, -1: nobody's, or nobody knows whose: what was left then
        counts as that of the user whose job was here last.
        """
        from robust_slurm.slurm import SlurmError

        context = self._system.context
        # The present time, not that of the run's start: it decides which drains count against it.
        parsed = parse_reason(reason)
        job = context.job or (parsed.job if parsed is not None else 0)
        why = cause(reason)
        whose = account(self._system, uid) if uid >= 0 or why != USER else self._last_user()
        own = Drain(round(time.time(), 6), context.node, job, why, whose)
        try:
            node = self._door().nodes([own.node]).get(own.node)
        except SlurmError as error:
            return self._unheard(own, reason, str(error))
        if node is None:
            return self._unheard(own, reason, f"Slurm has no node {own.node}")
        standing = stands(node, reason)
        if standing is not None:
            return standing
        if "DRAIN" in node.state:  # drained for a milder action: out of service already
            return self._order(own, reason)
        reason, why = self._escalated(own, reason)
        outcome = self._place(own, reason)
        return outcome._replace(reason=reason, why=why) if why and outcome.drained else outcome

    # ---- inside

    def _last_user(self) -> int:
        """Return the user whose job was here last; -1: there is no note of one."""
        context = self._system.context
        if context.where == "epilog" and context.uid > 0:
            return account(self._system, context.uid)
        try:
            known = notes(str(self._settings.gate["spool"]), time.time())
        except OSError:
            return -1
        return account(self._system, known[0].uid) if known else -1

    def _escalated(self, own: Drain, reason: str) -> tuple[str, str]:
        """The reason with action "service" and why, if the node was drained for it too often."""
        parsed = parse_reason(reason)
        if own.cause in SHARED:  # a shared service failed again, which service cannot repair
            return reason, ""
        why = service(parsed, self._events(), own.time, rules_of(self._settings))
        return (parsed._replace(action="service").text, why) if parsed and why else (reason, "")

    def _place(self, own: Drain, reason: str) -> DrainOutcome:
        answer, why_not = self._reserved(own, reason)
        shown = SlurmsRecords(own, self._limits, self._door, self._pause, self._rest)
        if answer is None:
            return self._without_ledger(shown, reason)._replace(note=why_not)
        if not answer.allowed:
            return DrainOutcome(bound=answer.why)
        began = time.monotonic()
        pending, same = ([Drain(*row) for row in rows] for rows in (answer.pending, answer.same))
        bound = shown.limit(pending, same)
        outcome = DrainOutcome(bound=bound) if bound else self._order(own, reason)
        if outcome.drained and time.monotonic() - began > TICK_S:
            bound = shown.recount(reason, reserved=True)
            outcome = DrainOutcome(bound=bound) if bound else outcome
        if outcome.kept or bound:
            state_dir = self._settings.state_dir
            took_back = self._left(LEDGER_S)
            call_on(state_dir, lambda: withdraw(state_dir, own, reason, bound), took_back)
        return outcome

    def _rest(self) -> float:
        return self._until - time.monotonic()

    def _left(self, most: float) -> float:
        return max(0.1, min(most, self._rest()))

    def _door(self) -> Slurm:
        return self._open(self._left(float(self._settings.gate["scontrol_deadline"])))

    def _reserved(self, own: Drain, reason: str) -> tuple[Permission | None, str]:
        """Ask the breaker, by the shared ledger; None and the reason if there is no ledger."""
        state_dir = self._settings.state_dir
        if not state_dir:
            return None, "no state_dir is set"
        answer, error = call_on(  # slurm.conf may lie on a dead file system, too
            state_dir,
            lambda: reserve(state_dir, own, self._limits, fleet_size(self._system), reason),
            self._left(LEDGER_S),
        )
        return (None, f"no shared ledger: {error}") if error else (Permission(*answer), "")

    def _order(self, own: Drain, reason: str) -> DrainOutcome:
        from robust_slurm.slurm import SlurmError

        try:
            result = self._door().drain(own.node, reason)
        except SlurmError as error:
            return DrainOutcome(error=str(error))
        if not result.done:
            return DrainOutcome(kept=result.before.reason or "")
        return DrainOutcome(drained=True)

    def _without_ledger(self, shown: SlurmsRecords, reason: str) -> DrainOutcome:
        """Count by Slurm's own records: drain, count again, undrain if it was one too many."""
        from robust_slurm.slurm import SlurmError

        try:
            bound = shown.forbid()
        except SlurmError as error:
            return self._uncounted(shown.own, str(error))
        if bound:
            return DrainOutcome(bound=bound)
        outcome = self._order(shown.own, reason)
        if outcome.error:  # it may have been carried out all the same
            shown.take_back(reason, outcome.error)
            return self._uncounted(shown.own, outcome.error)
        bound = shown.recount(reason) if outcome.drained else ""
        return DrainOutcome(bound=bound) if bound else outcome

    def _unheard(self, own: Drain, reason: str, error: str) -> DrainOutcome:
        """Decide while Slurm does not answer: it drains the node itself if the gate ends with 1."""
        answer = self._reserved(own, reason)[0]
        if answer is None:
            return self._uncounted(own, error)
        return DrainOutcome(error=error) if answer.allowed else DrainOutcome(bound=answer.why)

    def _uncounted(self, own: Drain, error: str) -> DrainOutcome:
        """Decide while neither the ledger nor Slurm answers, so that drains cannot be counted.

        Only hard evidence closes the gate then. Any other finding may have the same cause as the
        silence of both, on every node at once.
        """
        if own.cause != HARD_CAUSE:
            return DrainOutcome(bound=f"no shared ledger, and Slurm does not answer: {error}")
        decision = allowed(self._own_drains(), own.time, self._limits, 0, own)
        return DrainOutcome(error=error) if decision.allowed else DrainOutcome(bound=decision.why)

    def _own_drains(self) -> list[Drain]:
        """The drains in this node's own history; other nodes' drains are not in it."""
        node = self._system.context.node
        return [
            Drain(e.time, node, job_in(e.data), cause(str(e.data.get("reason", ""))))
            for e in self._events()
            if e.kind == "drain"
        ]

    def _events(self) -> list[Event]:
        try:
            return self._system.history()
        except OSError:
            return []


def stands(node: SlurmNode, reason: str) -> DrainOutcome | None:
    """The result of a drain for ``reason`` on a node that is drained already; None: to be made.

    A reason of ours gives way to one whose action is harder, and to no other.
    """
    if "DRAIN" not in node.state:
        return None
    old, new = parse_reason(node.reason or ""), parse_reason(reason)
    if old is None:
        return DrainOutcome(kept=node.reason or "(no reason)")
    if new is not None and rung(new.action) > rung(old.action):
        return None
    return DrainOutcome(drained=True, stood=True)


def job_in(data: Mapping[str, Any]) -> int:
    """The job of an event's data; 0 for anything else that may stand there."""
    job = data.get("job")
    return job if isinstance(job, int) and not isinstance(job, bool) else 0


def drain_event(
    system: System,
    reason: str,
    outcome: DrainOutcome,
    evidence: str,
    told_slurm: str = "",
    behind: Sequence[AcceptedReport] = (),
    uid: int = -1,
) -> Event:
    """The history's event of a drain. ``told_slurm``: the reason that Slurm itself will write
    because the gate exits with 1 ("Prolog error"); only where ours could not be placed.
    ``behind``: the reports that led to it. ``uid``: the user whose doing it is, where the context
    has none."""
    context = system.context
    given, placed = parse_reason(reason), outcome.reason or reason
    parsed = parse_reason(placed)
    data: dict[str, Any] = {
        "reason": placed,
        "job": context.job,
        "uid": context.uid if context.uid >= 0 else uid,
        "where": context.where,
        "evidence": evidence[:600],
        "placed": outcome.drained,
    }
    if parsed is not None:
        data |= {"check": parsed.check, "device": parsed.device, "action": parsed.action}
        data["class"] = parsed.cls
    if outcome.reason and given is not None:
        data |= {"base": given.action, "why": outcome.why}
    if told_slurm:
        data["as"] = told_slurm
    if behind:
        data["reports"] = [{"job": one.job, "name": one.name} for one in behind]
    if outcome.error:
        data["error"] = outcome.error[:300]
    return Event(round(time.time(), 6), "drain", system.boot_id(), data)
