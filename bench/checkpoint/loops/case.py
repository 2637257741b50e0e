"""Random training loops that crash at a random moment: ``python -m bench.checkpoint --case loops``.

Each loop runs three times: without a Checkpointer and without a fault (the reference); with one,
until it is killed; and once more, resumed from what the real Store kept. The last state of the
resumed run must be the reference's to the bit. Where it is not, the objects to blame are those
that came back from resume() unlike the reference's at that save(), and those that the reference
changed after save() and before its next step. The Checkpointer must have warned of each of them by
its name, of the first kind before the resume: anything else is a silent difference.

The loops run in forks of one process that has imported torch (``bench.checkpoint.loops.loop``).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.common import BenchError, Results
from robust_slurm.checkpoint.store.events import Event, Restore
from robust_slurm.checkpoint.store.store import Store

LOOPS = 200
QUICK_LOOPS = 12
EARLY, LATE = 1, 7
"""Steps at which partial writes begin: while every snapshot is watched, and long after."""
RUN_DEADLINE = 60  # s; a loop takes well under one
KEY = b"bench.checkpoint bench.checkpoint"[:32]
NAMES = {
    "model": r"\bmodel\.",
    "optimizer": r"\boptimizer\.",
    "scheduler": r"\bextra\.scheduler\d|a learning-rate scheduler steps with it",
    "ema": r"\bextra\.ema\b",
    "scaler": r"\bextra\.scaler\b",
    "generator": r"\bextra\.generator\b",
    "tokens": r"\bextra\.tokens\b",
    "rng": r"\brng\b",
    "gradients": r"\bthe gradients of ",
}
"""Name of each object in a warning."""
GRADIENTS_OF = re.compile(r"(?<=the gradients of )[^:]*")  # it names parameters, and not their data
LATE_NAME = "gradients"
"""With save() before the optimizer's step, all that the script does from that step on comes after
it: the warning names the gradients that the step has yet to use."""
TOLD = "nothing can warn of changes to them that come after save()"
"""Part of the warning that the optimizer's steps are not seen: it names no object."""
OUTCOMES = ("identical", "refused", "silent")


@dataclass(frozen=True, slots=True)
class Loop:
    """One training loop and its crash. Where something is ``off`` it does not occur."""

    seed: int
    steps: int
    model: str
    optimizer: str
    update: str
    """The way of the optimizer's step: ``step``, ``compiled``, or ``unseen``: written through a
    view of numpy, as a CUDA graph replays it, without hooks and version counters."""
    scheduler: str
    ema: str
    swap: str
    """The way in which an evaluation swaps the averaged weights in and out, after save()."""
    writes: str
    """The way in which weights are scaled outside the optimizer."""
    writes_at: str
    accumulate: int
    scaler: bool
    counter: str
    data: str
    save_at: str
    since: int
    """Swaps and writes begin at this step."""
    slow_ms: float
    """The copy thread begins so late, as under load."""
    crash_step: int
    crash_at: str
    partial: str
    """The way in which a few items of each weight are written without a version."""
    partial_at: str
    partial_since: int


def draw(seed: int) -> Loop:
    """The loop of a seed."""
    pick = random.Random(seed)
    steps = pick.randint(8, 14)
    drawn = Loop(
        seed=seed,
        steps=steps,
        model=pick.choice(["plain", "batchnorm", "dropout", "frozen", "tied", "flat"]),
        optimizer=pick.choice(["sgd", "momentum", "adam", "adamw", "rmsprop", "adagrad", "two"]),
        update=pick.choice(["step", "step", "step", "compiled", "unseen"]),
        scheduler=pick.choice(["off", "before save", "before save", "after save", "not given"]),
        ema=pick.choice(["off", "off", "before save", "before save", "after save"]),
        swap=pick.choice(["off", "off", "data", "numpy", "copy_"]),
        writes=pick.choice(["off", "off", "data", "numpy", "no_grad"]),
        writes_at=pick.choice(["before save", "after save", "before forward"]),
        accumulate=pick.choice([1, 1, 2, 3]),
        scaler=pick.random() < 0.2,
        counter=pick.choice(["off", "before save", "before save", "after save"]),
        data=pick.choice(["generator", "global", "loader", "workers"]),
        save_at=pick.choice(["end", "end", "end", "end", "end", "micro", "early"]),
        since=pick.choice([1, 1, 1, 6]),
        slow_ms=pick.choice([0.0, 1.0, 5.0, 20.0]),
        crash_step=pick.randint(1, steps - 1),
        crash_at=pick.choice(["save", "forward", "backward", "update", "end"]),
        partial=pick.choice(["off", "off", "clamp", "row"]),
        partial_at=pick.choice(["before save", "after save", "before forward"]),
        partial_since=pick.choice([EARLY, LATE]),
    )
    if drawn.partial == "off":
        return drawn
    # A write that begins after the crash would test nothing, nor a late one that the copy misses.
    drawn = replace(drawn, crash_step=pick.randint(drawn.partial_since, steps - 1))
    if drawn.partial_since == EARLY:
        return drawn
    return replace(
        drawn,
        partial_at=pick.choice(["after save", "before forward", "before forward"]),
        slow_ms=pick.choice([1.0, 5.0, 20.0]),
        crash_at=pick.choice(["forward", "backward", "backward", "update"]),
    )


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a loop."""

    loop: Loop
    outcome: str
    """One of OUTCOMES."""
    resumed: int
    """Step that the second run began with."""
    warnings: tuple[str, ...]
    unnamed: tuple[str, ...] = ()
    """Objects that differ and that no warning names; empty too where none was found to differ."""

    @property
    def needless(self) -> bool:
        """True if it was warned of something though nothing differed."""
        return self.outcome == "identical" and bool(self.warnings)


def judge(
    loop: Loop, reference: dict[str, Any], resumed: dict[str, Any] | None, said: str, again: str
) -> Found:
    """``resumed``: what the second run left, None if it refused; ``said``, ``again``: all that the
    run that crashed and the second one wrote to stderr."""
    before = _names(said)
    names = before | _names(again)
    warnings = tuple(line for line, those in names.items() if those)
    warned, named = set().union(*before.values()), set().union(*names.values())
    if resumed is None:
        return Found(loop, "refused", -1, warnings)
    began = int(resumed["began"])
    if resumed["state"] == reference["state"]:
        return Found(loop, "identical", began, warnings)
    step = str(resumed["step"])
    ended = reference["ended"][step]
    saved = reference["saved"].get(step, ended)  # step 0 was never saved
    lost, late = _differing(saved, resumed["resumed"]), _differing(saved, ended)
    if loop.save_at == "early" and LATE_NAME in named:
        named |= late - lost
    unnamed = tuple(sorted((lost - warned) | (late - named)))
    outcome = "refused" if lost | late and not unnamed else "silent"
    return Found(loop, outcome, began, warnings, unnamed)


def _names(said: str) -> dict[str, set[str]]:
    """The Checkpointer's lines, with the objects that each names."""
    lines = (line for line in said.splitlines() if line.startswith("robust-slurm:"))
    return {
        line: {n for n, how in NAMES.items() if re.search(how, GRADIENTS_OF.sub("", line))}
        for line in lines
    }


def _differing(one: dict[str, int], other: dict[str, int]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


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

    def run(self, loop: Loop, **options: Any) -> tuple[int, dict[str, Any] | None, str]:
        """Its exit code or minus a signal, its result if it came to one, and its stderr."""
        result, err = self._scratch / "result", self._scratch / "err"
        for path in (result, err):
            path.write_text("")
        order = {"loop": asdict(loop), "result": str(result), "err": str(err), **options}
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"deadline": RUN_DEADLINE, **order}) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        text = result.read_text()
        return code, json.loads(text) if text else None, err.read_text()

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
    """Run one loop three times and compare. BenchError where a run itself went wrong."""
    code, reference, said = run.run(loop)
    if code or reference is None:
        raise BenchError(f"{loop}: the reference ended with {code}: {said[-2000:]}")
    with tempfile.TemporaryDirectory(prefix="loops-", dir="/dev/shm") as directory:
        store = Store(Path(directory) / "s", name="loops", key=KEY, emit=_ignore)
        try:
            store.begin(0, None)
            store.place({0: None})  # no peer
            socket = str(store.socket_path)
            _, finished, said = run.run(loop, socket=socket, epoch=0, crash=True)
            if finished is not None:
                raise BenchError(f"{loop}: it did not crash: {said[-2000:]}")
            good = [one for one in store.stock() if one.ok]
            newest = max(good, key=lambda one: one.step, default=None)
            plan = None if newest is None else Restore(newest.step, "memory", {0: newest.file})
            store.begin(1, plan)
            store.place({0: None})
            code, resumed, again = run.run(loop, socket=socket, epoch=1)
        finally:
            store.close()
    if code and "robust-slurm" not in again and "CheckpointError" not in again:
        raise BenchError(f"{loop}: resumed, it ended with {code}: {again[-2000:]}")
    return judge(loop, reference, resumed, said, again)


def _ignore(event: Event) -> None:
    """Drop the store's events, which are meant for robust-task."""


def loops(results: Results, tell: Callable[[str], None], first: int = 0) -> list[Found]:
    """Try loop after loop; record how many came to which outcome."""
    count = results.runs or (QUICK_LOOPS if results.quick else LOOPS)
    found = []
    with runner() as run:
        for seed in range(first, first + count):
            found.append(try_loop(draw(seed), run))
            if found[-1].outcome == "silent":
                what = ", ".join(found[-1].unnamed) or "no object that is compared"
                tell(f"silent ({what} differs, unnamed): {found[-1].loop}")
    outcomes = Counter(one.outcome for one in found)
    for name in OUTCOMES:
        results.count(f"loops.{name}", outcomes[name])
    results.count("loops.needless", sum(one.needless for one in found))
    lost = [max(0, one.loop.crash_step - one.resumed) for one in found if one.resumed >= 0]
    results.settings["loops"] = (
        f"{count} loops from seed {first}; {sum(one.resumed > 0 for one in found)} resumed from a "
        f"snapshot; at most {max(lost, default=0)} steps before the crash; loops.needless: warned, "
        "though nothing differed"
    )
    for name, partial in (("early", EARLY), ("late", LATE)):
        those = [
            one for one in found
            if one.loop.partial != "off" and one.loop.partial_since == partial
        ]  # fmt: skip
        outcomes = Counter(one.outcome for one in those)
        results.settings[f"{name} partial writes"] = ", ".join(
            f"{outcomes[each]} {each}" for each in OUTCOMES
        )
    if silent := [one for one in found if one.outcome == "silent"]:
        seeds = "; ".join(f"{one.loop.seed} ({' '.join(one.unnamed) or '?'})" for one in silent)
        told = sum(any(TOLD in line for line in one.warnings) for one in silent)
        others = sum(bool(one.warnings) for one in silent)
        results.settings["silent seeds"] = (
            f"{seeds}; warned of something else: {others}, of these in general words "
            f"({TOLD!r}): {told}"
        )
    return found
