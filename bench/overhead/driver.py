"""The part of bench.overhead that runs inside the job, as its batch script.

Runs the same commands under srun and robust-srun in turn and writes the times as JSON lines to
``--out``: ``{"what": …, "launcher": …, "value": seconds}``.
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

from bench.training.job import MODULE, read_lines
from bench.training.rank import FIRST_STEPS, RESULT, append

LAUNCHERS = ("srun", "robust-srun")
DEADLINE = 180.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start-runs", type=int, default=0)
    parser.add_argument("--step-runs", type=int, default=0)
    parser.add_argument("--workload", choices=list(MODULE), default="toy")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-time", type=float, default=0.0)
    args = parser.parse_args(argv)
    for run in range(args.start_runs):
        for launcher in in_turn(run):
            first, end = start_up(launcher)
            note(args.out, "first_line", launcher, first)
            note(args.out, "hostname", launcher, end)
    for run in range(args.step_runs):
        for launcher in in_turn(run):
            name = f"{args.workload}-{launcher}-{run}"
            first, step = training(launcher, args, args.out.parent / name)
            note(args.out, "first_step", launcher, first)
            note(args.out, "step", launcher, step)
    append(args.out, json.dumps({"what": "done"}))


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


def training(launcher: str, args: argparse.Namespace, directory: Path) -> tuple[float, float]:
    """Seconds from exec to the last rank's first step, and the median step time of rank 0."""
    directory.mkdir()
    argv = [launcher, sys.executable, "-m", MODULE[args.workload], "--dir", str(directory)]
    argv += ["--steps", str(args.steps), "--step-time", str(args.step_time)]
    began = time.time()
    subprocess.run(argv, check=True, timeout=DEADLINE, stdin=subprocess.DEVNULL)
    first = max(float(n["time"]) for n in read_lines(directory / FIRST_STEPS)) - began
    return first, float(json.loads((directory / RESULT).read_text())["step_s"])


if __name__ == "__main__":
    main()
