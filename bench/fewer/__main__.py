"""Steps in ten minutes on a site that loses a machine each minute and has no spare.

All sides train at the same time, each in a lab of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from bench.common import BenchError, Results, finish, parser, results_for
from bench.fewer.replicas import TORCHFT, tail
from bench.fewer.sides import SIDES, slurm_side, torchft_side
from bench.fewer.site import Schedule
from lab.errors import LabError

LONG = Schedule(seconds=600.0, every=60.0, repair=30.0)
QUICK = Schedule(seconds=100.0, every=60.0, repair=30.0)
OTHER = "torchft"
UNITS = {"steps": "steps", "restarts": "count"}


def main() -> int:
    """Run the benchmark; exit code 1 when a side could not be measured."""
    options = parser("fewer", [*SIDES, OTHER])
    options.add_argument(
        "--keep", type=Path, metavar="DIR", help="for the output of each side; else a new directory"
    )
    args = options.parse_args()
    results = results_for("fewer", args)
    names = args.case or [*SIDES, *([OTHER] if TORCHFT else [])]
    if OTHER in names and not TORCHFT:
        options.error("torchft: BENCH_TORCHFT must be the path of a torchft_lighthouse")
    if OTHER in names:
        version = subprocess.run([TORCHFT, "--version"], stdout=subprocess.PIPE, text=True)
        results.settings["version"] = version.stdout.strip()
    output = args.keep or Path(tempfile.mkdtemp(prefix="bench-fewer-"))
    print(f"the output of each side: {output}", flush=True)
    fine = measure(results, names, QUICK if results.quick else LONG, output)
    return finish(results, args) or int(not fine)


def measure(results: Results, names: list[str], schedule: Schedule, output: Path) -> bool:
    """Add the sides' steps, and those of fewer nodes as a multiple of the others'."""
    sides: dict[str, Callable[[Path], dict[str, int]]] = {
        name: partial(torchft_side, schedule)
        if name == OTHER
        else partial(slurm_side, SIDES[name], schedule)
        for name in names
    }
    for name in names:
        (output / name).mkdir(parents=True, exist_ok=True)
    fine = True
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = {name: pool.submit(side, output / name) for name, side in sides.items()}
        for name, run in runs.items():
            try:
                wrong = "" if add(results, name, run.result()) else "no step in the time"
            except (BenchError, LabError, OSError) as error:
                wrong = str(error)
            if wrong:
                ends = [tail(path) for path in sorted((output / name).glob("*"))]
                print(f"{name}: {wrong}", *ends, sep="\n", file=sys.stderr, flush=True)
                fine = False
    results.settings |= {
        "seconds": schedule.seconds,
        "a machine is lost every": f"{schedule.every:g} s, {len(schedule.losses())} in all",
        "another is there after": f"{schedule.repair:g} s",
    }
    compare(results)
    return fine


def add(results: Results, name: str, counts: dict[str, int]) -> bool:
    """Add what a side has counted; whether it made a step at all."""
    for what, number in counts.items():
        results.once(f"{name}.{what}", number, UNITS[what])
    return counts["steps"] > 0


def compare(results: Results) -> None:
    """Add the ratios of the steps with fewer nodes to those of each side that made any."""
    steps = {name for name in results.metrics if name.endswith(".steps")}
    if "fewer.steps" not in steps:
        return
    for name in sorted(steps - {"fewer.steps"}):
        if results.metrics[name].median > 0:
            results.ratio(f"fewer/{name.removesuffix('.steps')}", "fewer.steps", name)


if __name__ == "__main__":
    raise SystemExit(main())
