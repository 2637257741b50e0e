"""The checks' own process: it runs them one after another and writes their results as lines.

A line is a JSON list: ["start", family], then ["done", family, milliseconds, findings, error].
Sizes are limited, because users can cause any number of findings, of any length.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

from health.check import Check
from health.children.child import write_all
from health.finding import STATUSES, Finding
from health.node.system import System
from robust_slurm.text import one_line

MOST_FINDINGS = 256  # of one family


def work(system: System, checks: Sequence[Check]) -> Callable[[int], None]:
    """The function of the forked worker: it runs the checks and writes results to its pipe."""

    def run_all(fd: int) -> None:
        for check in checks:
            write_all(fd, json.dumps(["start", check.name]).encode() + b"\n")
            line = json.dumps(["done", check.name, *attempt(system, check)])
            write_all(fd, line.encode() + b"\n")

    return run_all


def attempt(system: System, check: Check) -> tuple[float, list[Finding], str]:
    """Run one check; return milliseconds, findings, and the exception as text ("": none)."""
    begin = time.monotonic()
    found: list[Finding] = []
    error = ""
    try:
        found = [shorten(finding) for finding in check.run(system)]
    except Exception as err:  # noqa: BLE001 - a check's bug must not take the others with it
        error = one_line(f"{type(err).__name__}: {err}{at(err)}")
    ms = round((time.monotonic() - begin) * 1000, 3)
    if len(found) > MOST_FINDINGS:
        text = f"{len(found) - MOST_FINDINGS} more findings, none worse, were left out"
        found.sort(key=lambda finding: -STATUSES.index(finding.status))
        found[MOST_FINDINGS:] = [Finding("WARN", "tool", f"{check.name}-many", "", text, "none")]
    return ms, found, error


def shorten(finding: Finding) -> Finding:
    """The finding on one line of bounded length."""
    return finding._replace(
        evidence=one_line(str(finding.evidence)),
        device=one_line(str(finding.device), 128),
    )


def at(err: BaseException) -> str:
    """The place in the check that raised: " (mounts.py:71)"."""
    trace = err.__traceback__
    found = ""
    while trace:
        path = trace.tb_frame.f_code.co_filename
        if "/checks/" in path or not found:
            found = f" ({path.rpartition('/')[2]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found
