"""Faults of a robust-srun job whose ranks compute on a GPU: ``python -m bench.recovery --cuda``.

In a lab of real Slurm daemons each node has one rank. All of them use the machine's first GPU, and
NCCL joins them over the lab's network as it joins ranks of different hosts. What rank 0 noted of
each step is compared with a job without a fault, bit for bit; after a change of the world's size,
nearly. Numbers are printed, and written,
after each case: the machine may be lent for a short time only.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.checkpoint.cuda.cases import NO_GPU, no_gpu
from bench.common import BenchError, Results, finish, in_time, summarise
from bench.recovery.cases import NO_LEASE, WENT_WRONG, crash_of, recovered
from bench.recovery.resized import grown, no_standby
from bench.training.device_train import STEPS
from bench.training.job import Training
from bench.training.rank import RAISE, STUCK
from lab import Cluster, Lab

NODES = 4
STEP_TIME = 0.05  # s of sleep in each step
SETTLED = 3.0  # s between two faults, once all ranks would start warm
BUDGET = 6 * 60.0  # s for all
LEAST = 45.0  # s that must be left for a job to begin
RUNS = 5
SPARES = 2  # crashes that a spare replaces: each needs a job of its own
FAULTS = {"kill": signal.SIGKILL, "raise": RAISE, "hang": signal.SIGSTOP, "stuck": STUCK}
HANGS = 2  # of each kind that takes 11 s to be known
SLOW = ("hang", "stuck")
ALL_NEW = "--robust-rejoin-limit=0"
FEWER = f"--robust-min-nodes={NODES - 1} --robust-standby-wait=1"
APART = 0.01  # of a loss: other rounding in a world of another size makes less
PASSED = ("LD_LIBRARY_PATH", "NCCL_", "TORCH_NCCL_")
"""Variables of ours that the ranks get, by their beginnings: some machines need them."""

Noted = dict[int, set[str]]
"""Step → what rank 0 noted of it, each time it was done."""


def run(results: Results, args: argparse.Namespace, device: str = "cuda") -> int:
    """Run all cases on ``device``; the exit code: 0, 1 when something went wrong, 2 for no GPU."""
    why = no_gpu() if device == "cuda" else ""
    if why:
        print(f"bench.recovery --cuda: {why}; nothing was measured", file=sys.stderr)
        return NO_GPU
    runs = results.runs or (1 if results.quick else RUNS)
    noted: dict[str, Noted] = {}
    resized: Noted = {}
    with Cluster(nodes=NODES + 1, standby=1) as lab:
        cases: dict[str, Callable[[float], None]] = {
            "rejoin": lambda _left: in_turn(results, lab, device, "rejoin", runs, noted),
            "all_new": lambda _left: in_turn(results, lab, device, "all_new", runs, noted),
            "spare": lambda _left: spare(results, lab, device, min(runs, SPARES), noted),
            "fewer": lambda _left: fewer(results, lab, device, resized),
            "same": lambda _left: same(results, lab, device, noted, resized),
        }
        failed = in_time(results, cases, (BUDGET, LEAST), WENT_WRONG, args.json)
    return finish(results, args) or (1 if failed else 0)


@contextmanager
def job(
    lab: Lab,
    device: str,
    *,
    spares: int = 0,
    options: str = "",
    where: str = "",
    more: Sequence[str] = (),
    step_time: float = STEP_TIME,
) -> Iterator[Training]:
    """Run a training of one rank a node; it is cancelled at the end."""
    training = Training.new(lab, "device", NODES)
    training.more = ["--device", device, *more]
    training.environ = {key: value for key, value in os.environ.items() if key.startswith(PASSED)}
    launch = f"exec robust-srun --robust-spares={spares} --robust-max-restarts=1000 {NO_LEASE}"
    size = [f"-N{NODES + spares}", "--ntasks-per-node=1", *(["-w", where] if where else [])]
    training.submit(f"{launch} {options}", ["--no-kill", *size], step_time)
    try:
        yield training
    finally:
        training.cancel()
        for line in lines_of(training.directory / "output"):
            if line.startswith("robust-s"):
                print(f"    {line}", flush=True)


def in_turn(
    results: Results, lab: Lab, device: str, case: str, runs: int, noted: dict[str, Noted]
) -> None:
    """Run one job through ``runs`` faults of each kind; the ranks take turns."""
    stays = case == "rejoin"
    faults = FAULTS if stays else {"kill": signal.SIGKILL}
    kept = NODES - 1 if stays else 0
    ranks = itertools.count(1)
    with job(lab, device, options="" if stays else ALL_NEW) as training:
        for name, signum in faults.items():
            found = []
            for _ in range(min(runs, HANGS) if name in SLOW else runs):
                ready(training, NODES)
                fault = partial(training.signal_rank, next(ranks) % NODES, signum)
                found.append(recovered(training, fault, "restart", must={"kept": kept}))
                tell(f"{case}_{name}: {shown(found[-1])}")
            note(results, f"cuda_{case}_{name}", found)
        training.wait_stepping()
    noted[case] = steps_of(training)


def spare(results: Results, lab: Lab, device: str, runs: int, noted: dict[str, Noted]) -> None:
    """Crash a node, whose rank a spare node takes; in a new job each time."""
    found = []
    for run in range(runs):
        with job(lab, device, spares=1) as training:
            ready(training, NODES + 1)
            with crash_of(lab, f"n{2 + run}", training) as crash:
                found.append(recovered(training, crash, "swap_spare"))
                training.wait_stepping()
            tell(f"spare_crash: {shown(found[-1])}")
        noted[f"spare {run + 1}"] = steps_of(training)
    note(results, "cuda_spare_crash", found)


def fewer(results: Results, lab: Lab, device: str, noted: Noted) -> None:
    """Crash a node for which there is no other; the job grows back when a standby node is free."""
    where = f"n[1-{NODES}]"
    with no_standby(lab) as free, job(lab, device, options=FEWER, where=where) as training:
        ready(training, NODES)
        with crash_of(lab, f"n{NODES}", training) as crash:
            shrunk = recovered(training, crash, "shrink")
            tell(f"shrink: {shown(shrunk)}")
            training.wait_stepping()
            back = grown(training, free, NODES)
            tell(f"grow: {shown(back)}")
            training.wait_stepping()
        noted |= steps_of(training)
    note(results, "cuda_shrink", [shrunk])
    note(results, "cuda_grow", [back])


def same(
    results: Results, lab: Lab, device: str, noted: Mapping[str, Noted], resized: Noted
) -> None:
    """Count the steps that a job without a fault computes otherwise. BenchError if there is one.

    ``resized``: steps of the job whose world changed. BenchError if a loss of them is far off.
    """
    last = max((max(steps, default=0) for steps in (*noted.values(), resized)), default=0)
    if not last:
        raise BenchError("no job has noted a step")
    with job(lab, device, more=["--steps", str(last)], step_time=0.0) as training:
        training.wait(lambda: len(steps_of(training)) >= last, f"{last} steps without a fault")
    true = steps_of(training)
    results.once("cuda_same.steps", sum(map(len, noted.values())), "count")
    wrong = {case: differing(steps, true) for case, steps in noted.items()}
    results.once("cuda_same.other", sum(map(len, wrong.values())), "count")
    first = {case: steps[0] for case, steps in wrong.items() if steps}
    if first:
        raise BenchError(f"other losses or weights than without a fault, from step: {first}")
    if resized:
        results.once("cuda_resized.steps", len(resized), "count")
        results.once("cuda_resized.loss_apart", far := apart(resized, true), "")
        if far > APART:
            raise BenchError(f"with other numbers of ranks, losses are {far:.2%} apart")


def differing(steps: Noted, true: Noted) -> list[int]:
    """Return the steps that were noted otherwise than in ``true``, in order. Pure."""
    return sorted(step for step, lines in steps.items() if lines != true.get(step))


def apart(steps: Noted, true: Noted) -> float:
    """Return by which part of it a loss differs most from the same step's in ``true``. Pure."""

    def losses(lines: set[str]) -> list[float]:
        return [float.fromhex(line.split()[1]) for line in lines]

    differences = (
        abs(loss / right - 1.0)
        for step, lines in steps.items()
        for right in losses(true.get(step, set()))
        for loss in losses(lines)
    )
    return max(math.inf if math.isnan(each) else each for each in differences)


def steps_of(training: Training) -> Noted:
    """Read what rank 0 has noted so far."""
    found: Noted = {}
    for line in lines_of(training.directory / STEPS):
        found.setdefault(int(line.split()[0]), set()).add(line)
    return found


def lines_of(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def ready(training: Training, warm: int) -> None:
    """Wait until the training steps, so many ranks would start warm, and all is calm."""
    training.wait_stepping()
    training.wait_warm(warm)
    time.sleep(SETTLED)


def note(results: Results, case: str, found: Sequence[Mapping[str, float]]) -> None:
    for phase in found[0] if found else ():
        samples = [each[phase] for each in found]
        results.metrics[f"{case}.{phase}_s"] = summarise(samples, "s")


def shown(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in phases.items())


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
