"""Random training loops that crash at a random moment: ``python -m bench.checkpoint --case loops``.

Each loop runs three times: without a Checkpointer and without a fault (the reference); with one,
until it is killed; and once more, resumed from what the real Store kept. The last state of the
resumed run must be the reference's to the bit. Where it is not, the objects to blame are those
that came back from resume() unlike the reference's at that save(), and those that the reference
changed after save() and before its next step. The Checkpointer must have warned of each of them by
its name, of the first kind before the resume: anything else is a silent difference. A run that
hangs, or ends by an error that is no refusal of ours, has failed.

The loops run in forks of one process that has imported torch (``bench.checkpoint.loops.loop``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.checkpoint.loops.case import EARLY, LATE, Loop, draw
from bench.checkpoint.loops.judging import OUTCOMES, RUN_DEADLINE, TOLD, Found, TrainingRun, judge
from bench.common import BenchError, Results
from robust_slurm.checkpoint.store.events import Restore, StoreEvent
from robust_slurm.checkpoint.store.store import Store

LOOPS = 200
QUICK_LOOPS = 12
KEY = b"bench.checkpoint bench.checkpoint"[:32]


class Runner:
    """Forks training processes; each runs one loop and leaves its result in a file."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        env = {k: v for k, v in os.environ.items() if not k.startswith(("ROBUST_", "SLURM_"))}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.checkpoint.loops.loop"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**env, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def run(self, loop: Loop, **options: Any) -> TrainingRun:
        """Run a loop once."""
        result, err = self._scratch / "result", self._scratch / "err"
        for path in (result, err):
            path.write_text("")
        order = {"loop": asdict(loop), "result": str(result), "err": str(err), **options}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"deadline": RUN_DEADLINE, **order}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        text = result.read_text()
        return TrainingRun(code, json.loads(text) if text else None, err.read_text())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(RUN_DEADLINE)


@contextmanager
def runner() -> Iterator[Runner]:
    """A Runner with a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="loops-") as directory:
        made = Runner(Path(directory))
        try:
            yield made
        finally:
            made.close()


def try_loop(loop: Loop, run: Runner) -> Found:
    """Run one loop three times and compare. BenchError where the reference itself went wrong."""
    plain = run.run(loop)
    if not plain.done or plain.result is None:
        raise BenchError(f"{loop}: the reference: {plain.end}")
    with tempfile.TemporaryDirectory(prefix="loops-", dir="/dev/shm") as directory:
        store = Store(Path(directory) / "s", name="loops", key=KEY, emit=_ignore)
        try:
            store.begin(0, None)
            store.place({0: None})  # no peer
            socket = str(store.socket_path)
            crashed = run.run(loop, socket=socket, epoch=0, crash=True)
            if crashed.done:
                raise BenchError(f"{loop}: it did not crash: {crashed.said[-2000:]}")
            if crashed.code != -signal.SIGKILL:
                return judge(loop, plain.result, crashed, None)
            good = [one for one in store.stock() if one.ok]
            newest = max(good, key=lambda one: one.step, default=None)
            plan = None if newest is None else Restore(newest.step, "memory", {0: newest.file})
            store.begin(1, plan)
            store.place({0: None})
            again = run.run(loop, socket=socket, epoch=1)
        finally:
            store.close()
    return judge(loop, plain.result, crashed, again)


def _ignore(event: StoreEvent) -> None:
    """Drop the store's events, which are meant for robust-task."""


def loops(
    results: Results, tell: Callable[[str], None], first: int = 0, large: bool = False
) -> list[Found]:
    """Try loop after loop from seed ``first``; record how many came to which outcome."""
    count = results.runs or (QUICK_LOOPS if results.quick else LOOPS)
    found = []
    with runner() as run:
        for seed in range(first, first + count):
            found.append(one := try_loop(draw(seed, large), run))
            if one.outcome == "silent":
                what = ", ".join(one.unnamed) or "no object that is compared"
                tell(f"seed {seed}: silent ({what} differs, unnamed): {one.loop}")
            if one.outcome == "failed":
                tell(f"seed {seed}: failed: {one.why}: {one.loop}")
    record(results, found)
    return found


def record(results: Results, found: Sequence[Found]) -> None:
    """Record the outcomes of loops, with their seeds where they are not as they should be."""
    outcomes = Counter(one.outcome for one in found)
    for name in OUTCOMES:
        results.count(f"loops.{name}", outcomes[name])
    for by in ("error", "warning"):
        results.count(f"loops.refused.{by}", sum(one.by == by for one in found))
    results.count("loops.needless", sum(one.needless for one in found))
    lost = [max(0, one.loop.crash_step - one.resumed) for one in found if one.resumed >= 0]
    width = found[0].loop.width
    results.settings["loops"] = (
        f"{len(found)} loops from seed {found[0].loop.seed}, layers of {width}; "
        f"{sum(one.resumed > 0 for one in found)} resumed from a snapshot; at most "
        f"{max(lost, default=0)} steps before the crash; loops.needless: warned, though nothing "
        "differed"
    )
    for name, partial in (("early", EARLY), ("late", LATE)):
        those = Counter(
            one.outcome for one in found
            if one.loop.partial != "off" and one.loop.partial_since == partial
        )  # fmt: skip
        results.settings[f"{name} partial writes"] = ", ".join(
            f"{those[each]} {each}" for each in OUTCOMES
        )
    if failed := [str(one.loop.seed) for one in found if one.outcome == "failed"]:
        results.settings["failed seeds"] = ", ".join(failed)
    if silent := [one for one in found if one.outcome == "silent"]:
        seeds = "; ".join(f"{one.loop.seed} ({' '.join(one.unnamed) or '?'})" for one in silent)
        told = sum(any(TOLD in line for line in one.warnings) for one in silent)
        others = sum(bool(one.warnings) for one in silent)
        results.settings["silent seeds"] = (
            f"{seeds}; warned of something else: {others}, of these in general words "
            f"({TOLD!r}): {told}"
        )
