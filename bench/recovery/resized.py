"""Cases ``shrink`` and ``grow`` of bench.recovery: a node is lost, and nothing replaces it.

``shrink``: from the crash until the ranks that are left step again; ``grow``: from the moment a
standby node is free again until all ranks of the full world have stepped.
"""

from __future__ import annotations

import itertools
import time

from bench.common import BenchError
from bench.recovery.cases import CRASH_NODES, NODES, RECOVERY, crash_of, recovered, robust_job
from bench.training.job import Training
from lab import Lab
from srun_wrapper.decide.incident import PHASES

STANDBY = "s1"
OPTIONS = f"--robust-min-nodes={NODES - 1} --robust-standby-wait=1"
SOME_STEPS = 2.0  # s of training with fewer


class Resized:
    """A job that loses a node while the only standby node is drained; a new one each time."""

    def __init__(self, lab: Lab, *, grow: bool) -> None:
        self._lab = lab
        self._grow = grow
        self._victims = itertools.cycle(CRASH_NODES[1:NODES])
        self._drained = False

    def once(self) -> dict[str, float]:
        victim, where = next(self._victims), ",".join(CRASH_NODES[:NODES])
        self._standby("drain")
        training = robust_job(self._lab, "saved", NODES, 1, where, options=OPTIONS)
        try:
            with crash_of(self._lab, victim, training) as crash:
                phases = recovered(training, crash, "shrink", NODES)
                return self._grown(training) if self._grow else phases
        finally:
            if self._drained:
                self._standby("resume")

    def _grown(self, training: Training) -> dict[str, float]:
        time.sleep(SOME_STEPS)
        known = len(training.incidents())
        self._standby("resume")
        at = time.time()
        training.wait(
            lambda: any(i.outcome == "recovered" for i in training.incidents()[known:]),
            "it did not grow back",
            RECOVERY,
        )
        found = training.incidents()[known:]
        if len(found) != 1 or found[0].warm != NODES:
            raise BenchError(
                f"{training.directory}: it did not grow back at once and warm: {found}"
            )
        phases = {name: found[0].phases.get(name, 0.0) for name in PHASES[1:]}
        end = found[0].detected + sum(phases.values())
        return {"detect": found[0].detected - at, **phases, "total": end - at}

    def _standby(self, state: str) -> None:
        argv = ["scontrol", "update", f"nodename={STANDBY}", f"state={state}"]
        words = [*argv, *(["reason=bench"] if state == "drain" else [])]
        self._lab.exec("head", words, user=False, check=True)
        self._drained = state == "drain"

    def close(self) -> None:
        """Do nothing: nothing runs between two faults."""
