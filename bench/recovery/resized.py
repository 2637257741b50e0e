"""Cases ``shrink`` and ``grow`` of bench.recovery: a node is lost, and nothing replaces it.

``shrink``: from the crash until the ranks that are left step again; ``grow``: from the moment a
standby node is free again until all ranks of the full world have stepped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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

    def once(self) -> dict[str, float]:
        victim, where = next(self._victims), ",".join(CRASH_NODES[:NODES])
        with no_standby(self._lab) as free:
            training = robust_job(self._lab, "saved", NODES, 1, where, options=OPTIONS)
            with crash_of(self._lab, victim, training) as crash:
                phases = recovered(training, crash, "shrink", NODES)
                return grown(training, free, NODES) if self._grow else phases

    def close(self) -> None:
        """Do nothing: nothing runs between two faults."""


@contextmanager
def no_standby(lab: Lab) -> Iterator[Callable[[], None]]:
    """Drain the standby node; yield what resumes it. At the end it is resumed in any case."""
    argv = ["scontrol", "update", f"nodename={STANDBY}"]
    resumed = False

    def resume() -> None:
        nonlocal resumed
        lab.exec("head", [*argv, "state=resume"], user=False, check=True)
        resumed = True

    lab.exec("head", [*argv, "state=drain", "reason=bench"], user=False, check=True)
    try:
        yield resume
    finally:
        if not resumed:
            resume()


def grown(training: Training, free: Callable[[], None], warm: int) -> dict[str, float]:
    """Free the standby node and wait until the training has all its ranks, so many of them warm."""
    time.sleep(SOME_STEPS)
    known = len(training.incidents())
    free()
    at = time.time()
    training.wait(
        lambda: any(i.outcome == "recovered" for i in training.incidents()[known:]),
        "it did not grow back",
        RECOVERY,
    )
    found = training.incidents()[known:]
    if len(found) != 1 or found[0].warm != warm:
        raise BenchError(f"{training.directory}: it did not grow back at once and warm: {found}")
    phases = {name: found[0].phases.get(name, 0.0) for name in PHASES[1:]}
    end = found[0].detected + sum(phases.values())
    return {"detect": found[0].detected - at, **phases, "total": end - at}
