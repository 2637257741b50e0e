"""Crashes of a node in a lab: until robust-srun knows, by silence alone and as it is now."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from bench.common import BenchError, Results
from bench.recovery.cases import JITTER, robust_job
from lab import Cluster, Lab, LabError

NODES, SPARES = 4, 1
WHERE = "n[1-5]"
VICTIMS = ("n2", "n3", "n4")
RULES = {"before": "--robust-unreachable-limit=0", "now": ""}
LIMIT = 60.0
SETTLED = 2.0  # s after the first steps: every node has witnesses by then


def crashes(results: Results, runs: int, tell: Callable[[str], None]) -> bool:
    """Crash a node ``runs`` times by each rule, in turns; False if a run went wrong."""
    found: dict[str, list[float]] = {rule: [] for rule in RULES}
    fine = True
    with Cluster(nodes=NODES + SPARES) as lab:
        for run in range(runs):
            for rule, option in RULES.items():
                victim = VICTIMS[run % len(VICTIMS)]
                try:
                    took, why = _crash(lab, victim, option)
                except (BenchError, LabError, OSError) as error:
                    tell(f"{rule} {run + 1}/{runs}: {error}")
                    fine = False
                    continue
                found[rule].append(took)
                tell(f"{rule} {run + 1}/{runs}: {victim} lost after {took:.3f} s: {why}")
    for rule, samples in found.items():
        if samples:
            results.add(f"node_crash_{rule}.detect_s", samples, "s")
    if all(found.values()):
        results.ratio("before/now", "node_crash_before.detect_s", "node_crash_now.detect_s")
    return fine


def _crash(lab: Lab, victim: str, option: str) -> tuple[float, str]:
    training = robust_job(lab, "toy", NODES, 1, WHERE, SPARES, option)
    crashed = False
    try:
        training.wait_stepping()
        time.sleep(SETTLED + random.uniform(0.0, JITTER))
        crashed = True
        at = lab.crash(victim)
        training.wait(lambda: bool(training.incidents()), f"{victim} is not lost", LIMIT)
        first = training.incidents()[0]
        return first.detected - at, first.action
    finally:
        training.scancel()
        if crashed:
            lab.heal(victim)
        training.cancel()
