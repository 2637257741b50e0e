"""Case ``overhead`` of bench.checkpoint: the cost of saving over a link too slow for every step.

A training saves over a link on which a replica takes SLOWER steps. The bench stands in for
robust-srun: it feeds the real Interval with the costs that the store reports, and orders from the
store what the Interval decides, also while it is measured. Measured are steps with saving over
steps without, in turn, before and after the interval has widened. After it the ratio must keep to
``checkpoint_overhead``. A step waits as for an accelerator, and computes little: how busy the other
cores are decides neither its time nor the interval.

``python -m bench.checkpoint.overhead BYTES STEP_S``: the training. Each JSON line on stdin orders
a block of steps, with or without saving, and is answered by their seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.checkpoint.nodes import Nodes
from bench.common import MIN_SAMPLES, REPOSITORY, BenchError, Results
from robust_slurm.checkpoint.planning.interval import Cost, Interval
from robust_slurm.settings import Config

STATE = 16 << 20  # bytes, about
STEP = 0.1  # s of waiting; the computation comes on top
SLOWER = 10  # steps that a replica takes
COUNTED = 2
"""Intervals of a block that count; one before them does not: the block before ends in it."""
QUICK_PAIRS = 2
CALM = 15.0  # s without another change of the interval, before anything is measured
DEADLINE = 180.0  # s for the interval to widen and stay


class Trainer:
    """The training process."""

    def __init__(self, nodes: Nodes) -> None:
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.overhead", str(STATE), str(STEP)],
            cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**env, "ROBUST_CKPT_SOCKET": nodes.sockets[0], "ROBUST_EPOCH": "0"},
        )  # fmt: skip
        self.about = self._answer()
        self.step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(DEADLINE)
        finally:
            self._process.kill()

    def block(self, steps: int, *, saves: bool) -> list[float]:
        """Seconds of each step."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"steps": steps, "saves": saves}) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self.step = int(answer["step"])
        return [float(one) for one in answer["seconds"]]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError("the training that saves ended; its stderr says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


def overhead(results: Results) -> None:
    """Add the ratios before and after the interval has widened."""
    pairs = results.runs or (QUICK_PAIRS if results.quick else MIN_SAMPLES)
    limit = Config().checkpoint_overhead / 100
    rate = STATE / (SLOWER * STEP)
    with Nodes(bandwidth=rate) as nodes:
        nodes.replicate(0)
        with Trainer(nodes) as trainer:
            trainer.block(5, saves=True)  # copied inside save(), every buffer used
            at_first = [pair(trainer, 1, number) for number in range(pairs)]
            pace = Pace(nodes, trainer, limit)
            pace.widen()
            widened, intervals = [], []
            for number in range(pairs):
                intervals.append(pace.interval.every)
                widened.append(pair(trainer, intervals[-1], number))
                pace.look()
        if alarms := nodes.alarms():
            raise BenchError("; ".join(alarms))
        about = trainer.about
    for name, found in (("overhead_every_step", at_first), ("overhead_widened", widened)):
        results.add(f"{name}.step_s", [one for one, _ in found], "s")
        results.add(f"{name}.plain_step_s", [other for _, other in found], "s")
        results.add(f"{name}.step_ratio", [one / other for one, other in found], "ratio")
        ratio = sum(one for one, _ in found) / sum(other for _, other in found)
        results.ratios[f"{name}: all steps with/without"] = ratio
    results.add("overhead_widened.every", intervals, "steps")
    results.settings["overhead"] = (
        f"{about['nbytes']} bytes in {about['tensors']} tensors; replica limited to "
        f"{rate / 1e6:.3g} MB/s; limit {100 * limit:g} %; {'; '.join(pace.texts)}"
    )


class Pace:
    """Decides how often the training saves, as robust-srun does."""

    def __init__(self, nodes: Nodes, trainer: Trainer, limit: float) -> None:
        self._node, self._trainer = nodes.remotes[0], trainer
        self._node.ask("costs")  # of blocks without saving in between
        self.interval = Interval(limit)
        self.texts: list[str] = []
        """A text for each change."""

    def widen(self) -> None:
        """Train until the interval has changed and then stayed."""
        began = changed = time.monotonic()
        while not self.texts or time.monotonic() < changed + CALM:
            if time.monotonic() > began + DEADLINE:
                raise BenchError(f"no steady interval in {DEADLINE:g} s: {self.texts or 'it is 1'}")
            self._trainer.block(2 * self.interval.every, saves=True)
            if self.look():
                changed = time.monotonic()

    def look(self) -> bool:
        """True if the interval changes from the next step on."""
        for rank, step, cost in self._node.ask("costs")["costs"]:
            self.interval.hear(rank, step, Cost(*cost))
        if not self.interval.adjust(time.monotonic(), self._trainer.step + 1):
            return False
        self._node.ask("save_every", every=self.interval.every, first=self.interval.first)
        self.texts.append(self.interval.text())
        return True


def pair(trainer: Trainer, every: int, number: int) -> tuple[float, float]:
    """Seconds of a step with saving, and of one without, in the one order or the other."""
    took = {}
    for saves in (True, False) if number % 2 else (False, True):
        counted = trainer.block(every * (1 + COUNTED), saves=saves)[every:]
        took[saves] = sum(counted) / len(counted)
    return took[True], took[False]


def main(argv: list[str]) -> None:
    """Be the training."""
    import torch

    from bench.checkpoint.saving.driver import quiet
    from bench.checkpoint.saving.own import Own
    from bench.checkpoint.work import Work

    nbytes, seconds = argv
    quiet()
    torch.set_num_threads(1)
    work = Work(int(nbytes))
    work.step()
    saver, at = Own(work, Path()), 0
    print(json.dumps({"nbytes": work.nbytes, "tensors": len(work.tensors())}), flush=True)
    for line in sys.stdin:
        order, found = json.loads(line), []
        for _ in range(order["steps"]):
            began = time.perf_counter()
            time.sleep(float(seconds))
            work.step()
            at += 1
            if order["saves"]:
                saver.save(at)
            found.append(time.perf_counter() - began)
        print(json.dumps({"step": at, "seconds": found}), flush=True)
    saver.close()


if __name__ == "__main__":
    main(sys.argv[1:])
