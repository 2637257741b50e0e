"""Common parts of prolog, epilog and sweep: one look at this node, reported, acted on, recorded."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from health.check import Condition, Where
from health.checks import ALL
from health.finding import Finding
from health.gate.verdict import Verdict, judge, reason_for
from health.node.silent import AGAIN, first_silence
from health.node.system import Event
from health.run.live import LiveSystem, context
from health.run.report import GateReport
from health.run.runner import run
from health.settings import Settings, defaults, load

if TYPE_CHECKING:
    from health.gate.act import DrainOutcome
    from health.history.node_reports import AcceptedReport
    from robust_slurm.command_line.parser import Parser

CRASHED = Condition(
    "gate-crashed", "ERROR", "tool", "none", "the gate itself failed; the node is not proven bad"
)
SILENT = Condition(
    "state-dir-silent",
    "WARN",
    "tool",
    "none",
    "the shared state_dir does not answer: records stay on this node until it does",
)
UNLOADED = 97  # exit code: the gate did not run; the stub does then what on_missing says
RECORD_S = 2.0  # for the history, here and on the shared file system
LOCAL_S = 1.0  # for the history here alone
# The modules of a drain, loaded ahead: the packages may be gone when it is due.
_DRAIN = (
    *("robust_slurm.slurm", "health.history.events", "health.gate.act", "health.node.trust"),
    *("health.gate.slurms_records", "health.checks.gpu.xid", "traceback", "socket"),
)
_LAST_S = 3.0  # beyond its time, for a gate that broke
SYSLOG = "/dev/log"
_CRITICAL = 3 << 3 | 2  # syslog(3): LOG_DAEMON, LOG_CRIT


class Late(Exception):
    """The gate as a whole overran its own deadline."""


class Gate:
    """One run of the gate. ``until`` (monotonic seconds) is when it must be over.

    Checks end at their deadline; after it there is time for two calls to Slurm.
    """

    def __init__(
        self,
        where: Where,
        words: Sequence[str],
        env: Mapping[str, str],
        settings: Settings | None = None,
    ) -> None:
        self.where = where
        self.begin = time.monotonic()
        known = context(where, env)
        self.settings = settings or load(env.get("ROBUST_SITE_CONFIG"), known.node, ALL)
        self.until = self.begin + budget(self.settings, where)
        self.enabled = bool(self.settings.gate["enabled"])
        self.dry_run = is_dry(words, env) or bool(self.settings.gate["dry_run"])
        self.system = LiveSystem(self.settings, known)

    @property
    def spool(self) -> str:
        return str(self.settings.gate["spool"])

    def left(self, most: float) -> float:
        """Seconds that something may take."""
        return max(0.1, min(most, self.until - time.monotonic()))

    def check(self, where: Where, deadline_s: float) -> GateReport:
        return run(self.system, ALL, where, deadline_s, meanwhile=load_drain())

    def judge(self, report: GateReport, more: Iterable[Finding] = ()) -> tuple[GateReport, Verdict]:
        """The verdict on a report and what else was found."""
        state_dir = self.settings.state_dir
        silent = first_silence(state_dir) if state_dir else ""
        known = any(one.check == SILENT.check for one in report.findings)
        said = [SILENT.found(f"{state_dir}: {silent}")] if silent and not known else []
        for finding in said:
            say(told(finding))
        whole = report._replace(findings=[*more, *report.findings, *said])
        return whole, judge(whole, self.settings)

    def drain(self, reason: str, uid: int = -1) -> DrainOutcome:
        """Drain this node; in a dry run only print that it would be drained."""
        from health.gate.act import Drainer, DrainOutcome

        if self.dry_run:
            say(f"dry run: would drain {self.system.context.node}: {reason}")
            return DrainOutcome(error="dry run")
        outcome = Drainer(self.settings, self.system, self.until).drain(reason, uid)
        if outcome.bound:
            alert(f"{self.system.context.node} {reason} {outcome}")
        return outcome

    def admits(self, outcome: DrainOutcome) -> bool:
        """True if the node accepts jobs although the gate is closed: a dry run, or the breaker.

        The gate must not end with 1 then, because Slurm would drain the node.
        """
        return bool(outcome.bound) or self.dry_run

    def drain_events(
        self,
        reason: str,
        outcome: DrainOutcome,
        evidence: str,
        behind: Sequence[AcceptedReport] = (),
    ) -> list[Event]:
        """For the history: the drain that was placed, or that exit code 1 will be."""
        from health.gate.act import drain_event

        if self.admits(outcome) or outcome.kept or outcome.stood:
            return []
        slurm = as_slurm_says(self.where, outcome)
        return [drain_event(self.system, reason, outcome, evidence, slurm, behind)]

    def record(self, events: Sequence[Event], *, shared: bool) -> bool:
        """Write events down; what fails is said. False: the node's own history lacks them."""
        from health.history import events as history

        state_dir = self.settings.state_dir if shared else ""
        deadline_s = self.left(RECORD_S if state_dir else LOCAL_S)
        failed = history.record(self.spool, state_dir, self.system.context.node, events, deadline_s)
        if failed.here or failed.shared not in ("", AGAIN):
            say(f"not recorded: {failed}")
        return not failed.here

    def event(self, kind: str, **data: Any) -> Event:
        """Return an event that happened now, to this job."""
        known = self.system.context
        base = {"where": known.where, "job": known.job, "uid": known.uid}
        return Event(round(time.time(), 6), kind, self.system.boot_id(), base | data)

    def run_event(self, report: GateReport, verdict: Verdict, did: str) -> Event:
        """One run that was not all PASS, with what each family took."""
        return self.event(
            "run",
            closed=verdict.closed,
            reason=verdict.reason,
            did=did,
            dry_run=self.dry_run,
            ms=report.total_ms,
            findings=[finding.as_dict() for finding in report.findings[:50]],
            ran=[[row.family, row.ms, row.status] for row in report.ran],
        )

    def new_events(self) -> list[Event]:
        """Events of GPUs in the kernel's log that the history does not hold yet."""
        from health.checks.gpu import xid

        try:
            return xid.events(self.system)
        except OSError as error:
            say(f"the kernel's log is not recorded: {error}")
            return []

    def app_xids(self) -> list[Event]:
        """The Xids of the programs of the job that ends, with its user."""
        from health.checks.gpu import xid

        try:
            return xid.of_job(self.system)
        except OSError as error:
            say(f"the job's Xids are not recorded: {error}")
            return []


def load_drain() -> Iterator[bool]:
    """Import all that a drain needs, in steps, while this process waits for slow checks: the
    packages may be gone when they end. What cannot be imported fails when it is needed."""
    for name in _DRAIN:
        try:
            import_module(name)
        except Late:
            raise
        except Exception:  # noqa: BLE001 - a module may be half written
            return
        yield True


def budget(settings: Settings, where: Where) -> float:
    """Seconds of a whole run: `robust-admin doctor` compares Slurm's time-outs with this."""
    return settings.deadline(where) + 2 * float(settings.gate["scontrol_deadline"])


def refused(where: Where, words: Sequence[str], env: Mapping[str, str]) -> int | None:
    """Answer a person's --help, a wrong argument, or a call that is not slurmd's; return the exit
    code, or None to go on."""
    odd = [word for word in words if word != "--dry-run"]
    if not odd and (where == "sweep" or "SLURM_JOB_ID" in env or "SLURM_JOBID" in env):
        return None
    if not odd:
        say(
            f"robust-{where} checks a node for a job, and slurmd has set no SLURM_JOB_ID: nothing "
            "was done; `robust-health check` looks at a node without a job"
        )
        return 2
    from robust_slurm.command_line.by_hand import refuse

    return refuse(build_parser(where), words)


def build_parser(where: Where) -> Parser:
    """Return the parser of robust-prolog or robust-epilog, for a person who asks."""
    from robust_slurm.command_line.by_hand import gate_parser

    return gate_parser(
        f"robust-{where}",
        f"Slurm's {where.capitalize()}: slurmd calls it as root for a job, by the stub that "
        "robust-admin installs. Without slurmd's variables of a job it does nothing; "
        "`robust-health check` looks at a node by hand.",
    )


def is_dry(words: Sequence[str], env: Mapping[str, str]) -> bool:
    return "--dry-run" in words or env.get("ROBUST_DRY_RUN", "") not in ("", "0")


def say(text: str) -> None:
    """One line to slurmd's log; parts of it may be a user's."""
    from robust_slurm.text import shown

    try:
        os.write(2, f"robust: {shown(text)}\n".encode(errors="backslashreplace"))
    except OSError:
        pass


def alert(text: str) -> None:
    """Write a line to the system's log: slurmd drops the output of a gate that ends with 0."""
    import socket

    line = f"<{_CRITICAL}>robust-slurm[{os.getpid()}]: {text}".encode(errors="backslashreplace")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as link:
            link.setblocking(False)  # the log's daemon may hang too
            link.sendto(line, SYSLOG)
    except OSError:
        pass  # there is no log daemon


def told(finding: Finding) -> str:
    where = f" {finding.device}" if finding.device else ""
    return f"{finding.status} {finding.check}{where}: {finding.evidence}"


def alarm(seconds: float) -> None:
    """Raise Late in this process after so many seconds, whatever it does then; 0: no more."""

    def late(number: int, frame: object) -> None:
        raise Late("the gate exceeded its own deadline")

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def serve(where: Where, words: Sequence[str], first_s: float, work: Callable[[Gate], int]) -> int:
    """One run for slurmd: ``work`` in a gate, under an alarm. The exit code.

    ``first_s``: until the settings say how long it may take.
    """
    wrong = refused(where, words, os.environ)
    if wrong is not None:
        return wrong
    gate: Gate | None = None
    try:
        alarm(first_s)
        gate = Gate(where, words, os.environ)
        if not gate.enabled:
            return 0
        alarm(gate.left(first_s * 100) + 1.0)
        code = work(gate)
        alarm(0)
        return code
    except Exception as error:  # noqa: BLE001 - whatever breaks: never open in silence
        try:
            return crashed(where, error, words, gate)
        except Exception as worse:  # noqa: BLE001 - the last resort: nothing counts such drains
            say(f"{where} failed: {error!r}, then {worse!r}")
            return UNLOADED


def crashed(where: Where, error: BaseException, words: Sequence[str], gate: Gate | None) -> int:
    """Report that the gate itself failed, and drain with class tool; return slurmd's exit code.

    A gate that fails on every node would drain them all, so the breaker applies here too. Beyond
    its limits the job is admitted, with an alert.
    """
    alarm(_LAST_S)
    data = broke(where, error)
    gate = gate or Gate(where, words, os.environ, defaults(ALL))  # for the breaker, above all
    text = data["error"]
    reason = reason_for(CRASHED.found(text), gate.system.context.job)
    gate.until = max(gate.until, time.monotonic() + 2.0)
    alarm(gate.until - time.monotonic() + _LAST_S)  # what hung before may hang again
    outcome = gate.drain(reason)
    say(str(outcome))
    crash = gate.event("crash", **data, did=str(outcome))
    gate.record([crash, *gate.drain_events(reason, outcome, text)], shared=False)
    alarm(0)
    return 0 if gate.admits(outcome) else 1


def broke(where: Where, error: BaseException) -> dict[str, str]:
    """Print that the gate's own code failed; return the data for the history."""
    import traceback

    text = f"{type(error).__name__}: {error}"
    say(f"{where}: the gate itself failed: {text}")
    trace = "".join(traceback.format_exception(error))[-1500:]
    for line in trace.splitlines():
        say(line)
    return {"error": text[:300], "trace": trace}


def as_slurm_says(where: Where, outcome: DrainOutcome) -> str:
    """The reason that Slurm writes when this gate ends with 1 and ours does not stand."""
    if outcome.drained or outcome.kept or where not in ("prolog", "epilog"):
        return ""
    return "Prolog error" if where == "prolog" else "Epilog error"
