"""The part of bench.overhead that runs inside the job, as its batch script.

Runs the same commands under srun and robust-srun in turn and writes the times as JSON lines to
``--out``: ``{"what": …, "launcher": …, "value": seconds}``. With ``--early`` also the mean step
time of each second of a training, and when all its ranks would have started warm.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.training.job import MODULE, read_lines
from bench.training.rank import FIRST_STEPS, RESULT, append

LAUNCHERS = ("srun", "robust-srun")
DEADLINE = 180.0
LOOK = 0.1  # s between two looks for warm interpreters


class Times(NamedTuple):
    """The times of one training, in seconds."""

    first_step: float
    """Time from exec to the last rank's first step."""
    step: float
    """The median of rank 0's."""
    seconds: list[float | None]
    """The mean step time in each second since rank 0's first step."""
    ready: float
    """Time from the last rank's first step until all would have started warm; 0.0: never seen."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-runs", type=int, default=0)
    parser.add_argument("--step-runs", type=int, default=0)
    parser.add_argument("--workload", choices=list(MODULE), default="toy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--early", action="store_true")
    args = parser.parse_args(argv)
    for run in range(args.start_runs):
        for launcher in in_turn(run):
            first, end = start_up(launcher)
            note(args.out, "first_line", launcher, first)
            note(args.out, "hostname", launcher, end)
    for run in range(args.step_runs):
        for launcher in in_turn(run):
            name = f"{args.workload}-{launcher}-{run}"
            times = training(launcher, args, args.out.parent / name)
            note(args.out, "first_step", launcher, times.first_step)
            note(args.out, "step", launcher, times.step)
            for second, mean in enumerate(filled(times.seconds) if args.early else (), 1):
                note(args.out, f"second_{second}", launcher, mean)
            if times.ready:
                note(args.out, "ready", launcher, times.ready)
    append(args.out, json.dumps({"what": "done"}))


def filled(seconds: Sequence[float | None]) -> list[float]:
    """Mean step times by second; one in which no step ended has that of the next in which one did.

    The step that ended there took all of it.
    """
    found: list[float] = []
    following = None
    for mean in reversed(seconds):
        following = mean if mean is not None else following
        if following is not None:
            found.append(following)
    return found[::-1]


def in_turn(run: int) -> tuple[str, ...]:
    """Return the launchers in order; the first one changes from run to run."""
    return LAUNCHERS if run % 2 == 0 else LAUNCHERS[::-1]


def note(out: Path, what: str, launcher: str, value: float) -> None:
    append(out, json.dumps({"what": what, "launcher": launcher, "value": value}))


def start_up(launcher: str) -> tuple[float, float]:
    """Seconds from exec of ``LAUNCHER hostname`` to its first line, and to its exit."""
    began = time.perf_counter()
    with subprocess.Popen([launcher, "hostname"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        pidfd = os.pidfd_open(child.pid)
        try:
            select.select([child.stdout], [], [], DEADLINE)
            first = time.perf_counter() - began
            lines = child.stdout.read().split()
            select.select([pidfd], [], [], DEADLINE)
            end = time.perf_counter() - began
        finally:
            os.close(pidfd)
    wanted = int(os.environ["SLURM_NTASKS"])
    if child.returncode != 0 or len(lines) != wanted:
        sys.exit(f"{launcher} hostname: code {child.returncode}, {len(lines)} lines of {wanted}")
    return first, end


def training(launcher: str, args: argparse.Namespace, directory: Path) -> Times:
    """Run one training."""
    directory.mkdir()
    argv = [launcher, sys.executable, "-m", MODULE[args.workload], "--dir", str(directory)]
    argv += ["--steps", str(args.steps), "--step-time", str(args.step_time)]
    began, ready = time.time(), 0.0
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL) as child:
        while args.early and not ready and child.poll() is None and time.time() < began + DEADLINE:
            time.sleep(LOOK)  # the same under srun: looking takes time, too
            ready = time.time() if all_warm(began) else 0.0
        try:
            code = child.wait(max(0.0, began + DEADLINE - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            raise
    if code:
        sys.exit(f"{launcher}: a training of {args.workload} ended with code {code}")
    first = max(float(n["time"]) for n in read_lines(directory / FIRST_STEPS))
    result = json.loads((directory / RESULT).read_text())
    step, seconds = float(result["step_s"]), list(result["seconds"])
    return Times(first - began, step, seconds, max(0.0, ready - first))


def all_warm(since: float) -> bool:
    """True if the roster of a step that began since then shows a warm interpreter for each rank."""
    job = Path(os.environ["ROBUST_STATE_DIR"], "jobs", os.environ["SLURM_JOB_ID"])
    for path in job.glob("roster.*.json"):
        if path.stat().st_mtime > since:
            nodes = json.loads(path.read_text())["nodes"]
            warm = sum(int(node["warm"]) for node in nodes if node["role"] in ("active", "spare"))
            if warm >= int(os.environ["SLURM_NTASKS"]):
                return True
    return False


if __name__ == "__main__":
    main()
