"""Run all checks of one place within one deadline, even if some hang or crash.

Three processes work at once: the collector that asks NVML, a worker with the checks that need no
GPU, and, as soon as NVML has answered or its deadline is over, one with those that do.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from health.check import Check, Where
from health.finding import Finding, Status, worst
from health.node.gpu_snapshot import GpuSnapshot
from health.node.stuck import Stuck
from health.node.system import System
from health.nvidia.nvml import Collector
from health.run.lane import FamilyResult, Lane, outcome
from health.run.report import GateReport, Ran
from health.run.worker import attempt
from health.settings import Settings
from robust_slurm.text import one_line

LATE = "gate-deadline"  # the id of the finding for checks that did not get to run
_PAUSED_S = 1.0  # by so much too late a poll returns only on a machine that was paused
_LONG_S = 0.2  # the checks of a healthy node are over
_LAST_S = 1.0  # reserved for the GPU checks within the deadline if NVML does not answer


class RunSystem(System, Protocol):
    """A system that can be run against: live, or live and recorded."""

    settings: Settings
    stuck: Stuck

    def start_nvml(self, deadline_s: float) -> Collector: ...

    def take_nvml(self, snapshot: GpuSnapshot) -> None: ...


def run(
    system: RunSystem,
    checks: Sequence[Check],
    where: Where,
    deadline_s: float,
    only: Collection[str] = (),
    seen: Callable[[FamilyResult], None] = lambda outcome: None,
    meanwhile: Iterator[bool] | None = None,
) -> GateReport:
    """Run every check of ``where`` (only those in ``only``, if any) and return the report.

    Does not raise and does not outlast the deadline by more than the time to kill what hangs.
    A check that had no time to run is an ERROR that closes the gate. ``seen`` gets each outcome.
    ``meanwhile`` is taken on, step by step, while there is nothing to do but wait for checks that
    take longer than on a healthy node.
    """
    begin = time.monotonic()
    limit = begin + deadline_s
    chosen, left_out = _choose(checks, where, only, system.settings)
    with_gpu = [check for check in chosen if check.needs_nvml]
    without = [check for check in chosen if not check.needs_nvml]
    collector = _start(system, limit) if with_gpu else None
    lanes = [Lane(system, without, system.stuck, limit)]
    while time.monotonic() < limit:
        if collector and collector.done:
            system.take_nvml(collector.snapshot)
            collector.close()
            collector = None
            lanes.append(Lane(system, with_gpu, system.stuck, limit))
        waiting = [lane for lane in lanes if not lane.done]
        if not waiting and collector is None:
            break
        if meanwhile and _idle(collector, waiting, begin + _LONG_S) and next(meanwhile, False):
            continue
        _wait(collector, waiting, limit)
    late = [check for lane in lanes for check in lane.pending]
    if collector:
        collector.close()
        late += with_gpu
    for lane in lanes:
        lane.abandon()
    outcomes = [outcome for lane in lanes for outcome in lane.outcomes] + _late(late, deadline_s)
    for each in outcomes:
        seen(each)
    return _report(system, where, system.settings, begin, chosen, left_out, outcomes)


def run_inline(
    system: System,
    checks: Sequence[Check],
    where: Where,
    settings: Settings,
    only: Collection[str] = (),
    given: Sequence[FamilyResult] = (),
) -> GateReport:
    """The same without processes and deadlines: for recorded trees, where nothing hangs.

    ``given``: outcomes that are known already; these families are not run.
    """
    begin = time.monotonic()
    chosen, left_out = _choose(checks, where, only, settings)
    outcomes = [each for each in given if each.check in chosen]
    known = {each.check.name for each in outcomes}
    outcomes += [outcome(c, *attempt(system, c)) for c in chosen if c.name not in known]
    return _report(system, where, settings, begin, chosen, left_out, outcomes)


def _start(system: RunSystem, limit: float) -> Collector:
    left = limit - time.monotonic()
    wanted = float(system.settings.gate["nvml_deadline"])
    collector = system.start_nvml(min(wanted, left))
    collector.limit = limit - min(_LAST_S, left / 4)
    collector.deadline = min(collector.deadline, collector.limit)
    return collector


def _idle(collector: Collector | None, lanes: list[Lane], until: float) -> bool:
    """Return whether nothing was written until then."""
    poll = select.poll()
    sources: list[Collector | Lane] = [*lanes, *([collector] if collector else [])]
    for source in sources:
        poll.register(source.fd, select.POLLIN)
    return not poll.poll(max(0.0, until - time.monotonic()) * 1000)


def _wait(collector: Collector | None, lanes: list[Lane], limit: float) -> None:
    """Wait until something was written or some deadline is over; then take it in."""
    sources: list[Collector | Lane] = [*lanes, *([collector] if collector else [])]
    poll = select.poll()
    for source in sources:
        poll.register(source.fd, select.POLLIN)
    until = min([limit, *(source.deadline for source in sources)])
    ready = {fd for fd, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000 + 1)}
    late = time.monotonic() - until
    if late > _PAUSED_S:  # the checks did not run either
        for source in sources:
            latest = source.limit if isinstance(source, Collector) else limit
            source.deadline = min(latest, source.deadline + late + _PAUSED_S)
    for source in sources:
        if source.fd in ready:
            source.feed()
        elif time.monotonic() >= source.deadline < limit:
            source.expire()


def _choose(
    checks: Sequence[Check], where: Where, only: Collection[str], settings: Settings
) -> tuple[list[Check], list[Check]]:
    """The checks to run, and those of them that the site switched off."""
    here = [c for c in checks if where in c.where and (not only or c.name in only)]
    off = set(settings.gate["disabled"])
    return [c for c in here if c.name not in off], [c for c in here if c.name in off]


def _late(checks: list[Check], deadline_s: float) -> list[FamilyResult]:
    """For the checks that the whole deadline cut off: one ERROR, which closes the gate.

    One WARN if none of them could have closed it.
    """
    names = ", ".join(check.name for check in checks)
    text = one_line(f"{deadline_s:g} s passed before these checks finished: {names}")
    status: Status = "WARN" if all(check.only_warns for check in checks) else "ERROR"
    return [
        FamilyResult(
            check,
            0.0,
            [] if number else [Finding(status, "tool", LATE, "", text, "none")],
            "not-run",
            by_runner=True,
        )
        for number, check in enumerate(checks)
    ]


def _report(
    system: System,
    where: Where,
    settings: Settings,
    begin: float,
    chosen: list[Check],
    left_out: list[Check],
    outcomes: list[FamilyResult],
) -> GateReport:
    off = set(settings.gate["disabled"])
    # Of a file that is used, the sweep and people hear: every job's prolog would record it.
    unsaid = settings.notes if where in ("prolog", "epilog") else ()
    order = {check.name: position for position, check in enumerate(chosen)}
    findings = [
        Finding("WARN", "tool", "config-unusable", "", one_line(problem), "none")
        for problem in settings.problems
        if problem not in unsaid
    ]
    ran: list[Ran] = []
    tolerated: set[str] = set()
    for each in sorted(outcomes, key=lambda each: order[each.check.name]):
        findings += each.findings
        kept = [finding for finding in each.findings if finding.check not in off]
        status = each.status if each.status == "not-run" else worst(kept)
        ran.append(Ran(each.check.name, each.ms, status))
        if not each.check.closes_on_error and each.status != "not-run":
            tolerated |= {finding.check for finding in kept if finding.status == "ERROR"}
    ran += [Ran(check.name, 0.0, "disabled") for check in left_out]
    dropped = dict.fromkeys(finding.check for finding in findings if finding.check in off)
    context = system.context
    return GateReport(
        node=context.node,
        where=where,
        job=context.job,
        time=system.now(),
        findings=[finding for finding in findings if finding.check not in off],
        ran=ran,
        total_ms=round((time.monotonic() - begin) * 1000, 3),
        disabled=[*(check.name for check in left_out), *dropped],
        tolerated=sorted(tolerated),
    )
