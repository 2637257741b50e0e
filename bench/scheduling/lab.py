"""The own measurements of bench.scheduling: several nodes lost at once, a pool too small.

The jobs are those of bench.recovery's ``node_crash_*_torch``, 4 nodes with one rank each. The batch
host is never lost: up to 3 nodes are.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from bench.common import MIN_SAMPLES, BenchError, Results
from bench.recovery.__main__ import IN_A_ROW, QUICK_RUNS, Found, inject, tell
from bench.recovery.cases import JITTER, NODES, Case, recovered, robust_job
from bench.training.job import Training
from lab import Cluster, Lab

MOST = NODES - 1
RECOVERY = 600.0
# A job that was cancelled while several of its nodes came back took more than a minute to complete.
COMPLETING = 300.0
OVER = {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL"}
COLD = "--robust-no-warm"
SHORT_LOST, SHORT_POOL = 2, 1


class Shape(NamedTuple):
    """``lost`` nodes at once, in a job with ``spares``."""

    lost: int
    spares: int
    options: str = ""


SHAPES: Mapping[str, Shape] = {
    **{f"node_crash_{k}_spare_torch": Shape(k, k) for k in range(2, MOST + 1)},
    **{f"node_crash_{k}_standby_torch": Shape(k, 0) for k in range(2, MOST + 1)},
    # Beside each other, as one is held against the other.
    "node_crash_spare_torch": Shape(1, 1),
    "node_crash_standby_torch": Shape(1, 0),
    "node_crash_standby_torch_cold": Shape(1, 0, COLD),
}
SHORT = "pool_short_torch"


def crash_all(lab: Lab, victims: list[str]) -> float:
    """All links go down, then all nodes die; the wall time of just before."""
    return min(fault(node) for fault in (lab.partition, lab.crash) for node in victims)


class Crashes:
    """Some nodes of a new job, none the batch host, are lost at once; they take turns."""

    def __init__(self, lab: Lab, shape: Shape) -> None:
        self._lab = lab
        self._shape = shape
        nodes = [f"n{number}" for number in range(2, NODES + 1)]
        self._victims = itertools.cycle(itertools.combinations(nodes, shape.lost))

    def once(self) -> dict[str, float]:
        victims = list(next(self._victims))
        shape = self._shape
        where = f"n[1-{NODES + shape.spares}]"
        training = robust_job(self._lab, "torch", NODES, 1, where, shape.spares, shape.options)
        try:
            return self._measure(training, victims)
        finally:
            training.scancel()
            state = self._lab.faults()
            down = [victim for victim in victims if state[victim] != "up"]
            with ThreadPoolExecutor(MOST) as pool:
                list(pool.map(self._lab.heal, down))
            training.scancel()
            self._lab.wait_job(training.job, OVER, COMPLETING)

    def _measure(self, training: Training, victims: list[str]) -> dict[str, float]:
        action = "swap_spare" if self._shape.spares else "swap_standby"
        warm = 0 if self._shape.options == COLD else NODES + self._shape.spares
        return recovered(training, lambda: crash_all(self._lab, victims), action, warm)

    def close(self) -> None:
        """Do nothing: nothing runs between two faults."""


class PoolShort(Crashes):
    """More nodes are lost than the standby partition has idle: the job requeues itself."""

    def __init__(self, lab: Cluster) -> None:
        super().__init__(lab, Shape(SHORT_LOST, 0))

    def once(self) -> dict[str, float]:
        size = ["-p", "standby", f"-N{MOST - SHORT_POOL}", "--exclusive"]
        hog = self._lab.sbatch("#!/bin/sh\nexec sleep 3600\n", size)
        self._lab.wait_job(hog, "RUNNING")
        try:
            return super().once()
        finally:
            self._lab.exec("head", ["scancel", str(hog)])
            self._lab.wait_job(hog, "CANCELLED")

    def _measure(self, training: Training, victims: list[str]) -> dict[str, float]:
        training.wait_stepping()
        training.wait_warm(NODES)
        time.sleep(random.uniform(0.0, JITTER))
        at = crash_all(self._lab, victims)
        back = lambda: len(training.first_steps(at)) == training.world  # noqa: E731
        training.wait(back, f"not requeued after the loss of {victims}", RECOVERY)
        found = training.incidents()
        if found[-1].action != "requeue":
            raise BenchError(f"{training.directory}: {found[-1].action} where it had to requeue")
        end = max(training.first_steps(at).values())
        return {"detect": found[0].detected - at, "total": end - at}


def measure(results: Results) -> bool:
    """Add the metrics of all shapes, in turns; False if a case went wrong."""
    runs = results.runs or (QUICK_RUNS if results.quick else MIN_SAMPLES)
    found: Found = {}
    failed: set[str] = set()
    with Cluster(nodes=NODES + MOST, standby=MOST) as lab:
        cases: dict[str, Case] = {name: Crashes(lab, shape) for name, shape in SHAPES.items()}
        cases[SHORT] = PoolShort(lab)
        for begin in range(0, runs, IN_A_ROW):
            for name, case in cases.items():
                for run in range(begin, min(begin + IN_A_ROW, runs)):
                    if name not in failed:
                        inject(name, case, f"{run + 1}/{runs}", found, failed)
    for name, samples in found.items():
        if name not in failed:
            for phase in samples[0]:
                results.add(f"{name}.{phase}_s", [s[phase] for s in samples], "s")
    if failed:
        tell(f"left out: {', '.join(sorted(failed))}")
    return not failed
