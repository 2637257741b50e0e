"""Records as bench.recovery writes them, with made up times."""

from __future__ import annotations

from collections.abc import Mapping

from bench.scheduling.model import (
    Term,
)

PHASES = ("decide", "stop", "replace", "restore", "launch", "first_step")
WAIT = 30.0


def t(seconds: float, p95: float | None = None) -> Term:
    return Term(seconds, seconds if p95 is None else p95, 20, "made up")


def record(**cases: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Build a record as in the JSON: medians as given, p95s twice as long."""
    return {
        f"{case}.{phase}_s": {"median": s, "p95": 2 * s, "n": 20}
        for case, phases in cases.items()
        for phase, s in phases.items()
    }


def incident(detect: float, *rest: float) -> dict[str, float]:
    """Phases of a case, with its total."""
    phases = dict(zip(PHASES, rest, strict=True))
    return {"detect": detect, **phases, "total": detect + sum(rest)}


REQUEUE = {"detect": 32.0, "total": 154.0}
FULL = record(
    node_crash_spare_torch=incident(1.5, 0.0, 0.1, 0.0, 0.05, 0.05, 0.3),
    node_crash_standby_torch=incident(1.5, 0.0, 0.1, 0.4, 0.05, 0.05, 0.3),
    rank_kill_torch=incident(0.1, 0.0, 0.1, 0.0, 0.0, 0.05, 0.35),
    rank_kill_torch_cold=incident(0.1, 0.0, 0.1, 0.0, 0.0, 0.1, 13.0),
    plain_requeue=REQUEUE,
)
# As of before there were warm starts, a standby node under torch, and a restore.
OLD = {
    name: value
    for name, value in record(
        node_crash_standby=incident(1.5, 0.0, 0.02, 0.4, 0.0, 0.1, 0.4),
        rank_kill_torch=incident(0.1, 0.0, 0.1, 0.0, 0.0, 0.1, 8.0),
        node_crash_spare_torch=incident(1.5, 0.0, 0.1, 0.0, 0.0, 0.1, 9.0),
        plain_requeue=REQUEUE,
    ).items()
    if not name.endswith(".restore_s")
}
