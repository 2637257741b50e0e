"""Steps in ten minutes on a site that loses a machine each minute and has no spare.

All sides train at the same time, each in a lab of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from bench.common import BenchError, Results, finish, parser, results_for
from bench.fewer.sides import SIDES, TORCHFT, slurm_side, torchft_side
from bench.fewer.site import Schedule
from lab.errors import LabError

LONG = Schedule(seconds=600.0, every=60.0, repair=30.0)
QUICK = Schedule(seconds=100.0, every=60.0, repair=30.0)
OTHER = "torchft"


def main() -> int:
    """Run the benchmark; exit code 1 when a side could not be measured."""
    options = parser("fewer", [*SIDES, OTHER])
    args = options.parse_args()
    results = results_for("fewer", args)
    names = args.case or [*SIDES, *([OTHER] if TORCHFT else [])]
    if OTHER in names and not TORCHFT:
        options.error("torchft: BENCH_TORCHFT must be the path of a torchft_lighthouse")
    fine = measure(results, names, QUICK if results.quick else LONG)
    return finish(results, args) or int(not fine)


def measure(results: Results, names: list[str], schedule: Schedule) -> bool:
    """Add the sides' steps, and those of fewer nodes as a multiple of the others'."""
    sides: dict[str, Callable[[], int]] = {
        name: partial(torchft_side, schedule)
        if name == OTHER
        else partial(slurm_side, SIDES[name], schedule)
        for name in names
    }
    fine = True
    with ThreadPoolExecutor(len(sides)) as pool:
        runs = {name: pool.submit(side) for name, side in sides.items()}
        for name, run in runs.items():
            try:
                results.once(f"{name}.steps", run.result(), "steps")
            except (BenchError, LabError, OSError) as error:
                print(f"{name}: {error}", file=sys.stderr, flush=True)
                fine = False
    results.settings |= {
        "seconds": schedule.seconds,
        "a machine is lost every": f"{schedule.every:g} s, {len(schedule.losses())} in all",
        "another is there after": f"{schedule.repair:g} s",
    }
    if "fewer.steps" in results.metrics:
        for name in results.metrics.keys() - {"fewer.steps"}:
            other = name.removesuffix(".steps")
            if results.metrics[name].median:
                results.ratio(f"fewer/{other}", "fewer.steps", name)
    return fine


if __name__ == "__main__":
    raise SystemExit(main())
