"""Consequences of a slow job: a warning and a record; a report only with evidence against a node.

Slow alone is no fault of a machine: its ranks' data, other work on the node and the program's own
duties of a rank look the same. Nothing here ends a job.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.decide.failure import Failure
from srun_wrapper.detect.slow_watch import SlowFinding
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.job.tempo import Slowdown
from srun_wrapper.recover.reports import Reports

WARNED = "warned"  # the outcome of an incident that changed nothing


class Slowness:
    """Acts on the findings of the watch for slow jobs."""

    def __init__(self, state: JobState, ledger: JobLedger, reports: Reports) -> None:
        self._state = state
        self._ledger = ledger
        self._reports = reports
        self._numbers = itertools.count(1)

    def found(self, finding: SlowFinding) -> None:
        """Print and record who is slow, and report or replace a machine that has a fault, too."""
        slow = finding.slow
        evidence = (*_lines(finding), *finding.facts.lines)
        replace = self._to_replace(finding)
        done = self._done(finding, replace)
        say(f"warning: {evidence[0]}")
        for line in (*evidence[1:], done):
            say(f"  {line}")
        self._ledger.event(
            "slow",
            **slow.record(),
            step_time=round(finding.pace.now, 4),
            usual=round(finding.pace.usual, 4),
            lines=[*evidence[1:], done],
        )
        if replace:
            at = time.monotonic()
            rank = next(iter(slow.ranks), None)
            failure = Failure(
                "slow", at, at, slow.node, rank, evidence=evidence, suspects=(slow.node,)
            )
            self._state.failures.append(failure)
            self._state.changed.set()
        elif slow.kind == "ranks":
            self._record(finding, evidence, done)

    def eased(self, pace: Slowdown) -> None:
        """Print and record that the job is as fast as usual again."""
        say(f"steps take {pace.now:.3g} s again, about as long as before ({pace.usual:.3g} s)")
        self._ledger.event("slow_over", step_time=round(pace.now, 4), usual=round(pace.usual, 4))

    def _to_replace(self, finding: SlowFinding) -> bool:
        state = self._state
        return finding.corroborated and state.config.slow == "replace" and bool(state.spares())

    def _done(self, finding: SlowFinding, replace: bool) -> str:
        node = finding.slow.node
        if replace:
            return f"{node} is replaced by a spare (slow = replace)"
        if finding.corroborated:
            why = "; no spare is idle" if self._state.config.slow == "replace" else ""
            return f"{node} is reported to the node gate and stays in the job{why}"
        if finding.slow.storage:
            return f"nothing is done: look at that file system on {node}, and at its use there"
        if finding.slow.loads:
            return "nothing is done: the rank waits for its data, which may be nobody's fault"
        if finding.slow.kind == "ranks":
            return "nothing is done: slow alone does not prove that a machine is at fault"
        return "nothing is done: no rank and no node is named"

    def _record(self, finding: SlowFinding, evidence: Sequence[str], done: str) -> None:
        state, slow = self._state, finding.slow
        number = state.incident_id(f"slow{next(self._numbers)}")
        rule, cause = "slow-rank", "unknown"
        if finding.corroborated:
            rule, cause = "slow-machine", "node"
        elif slow.storage and not slow.saves:  # a rank that saves for all waits for it alone
            rule, cause = "slow-storage", "storage"
        now = time.time()
        self._ledger.incident({
            "id": number,
            "job": state.job_id,
            "step_id": state.step_id,
            "epoch": state.world.epoch,
            "time": now,
            "symptom": "slow",
            "cause": cause,
            "suspects": [slow.node] if slow.node else [],
            "evidence": list(evidence),
            "rule": rule,
            "action": "none",
            "why": done,
            "rung": "",
            "swaps": [],
            "outcome": WARNED,
            "phases": {"detect": state.config.slow_after},
            "lost_steps": 0,
        })  # fmt: skip
        if finding.corroborated and (node := state.named(slow.node)) is not None:
            self._reports.report_slow(node, number, now, evidence, rule)


def _lines(finding: SlowFinding) -> list[str]:
    """Return who is slow, and where it is while the others wait."""
    slow, pace = finding.slow, finding.pace
    votes = f" ({slow.wins} of 5 rounds)" if slow.wins else ""
    lines = [
        f"steps take {pace.now:.3g} s, {pace.factor:.1f} times as long as before "
        f"({pace.usual:.3g} s): {slow.why}{votes}"
    ]
    if slow.calls:
        lines.append(f"rank {slow.ranks[0]} is in {' < '.join(slow.calls)}")
    if slow.storage:
        lines.append(slow.storage)
    return lines
