"""The time until training goes on after a fault: ``python -m bench.recovery`` (root).

Injects each fault many times into real trainings on a lab of real Slurm daemons and takes the
times of its phases; beside it, in the same run, plain Slurm's requeue and torchrun's restart.
See docs/bench.md for what is measured and how to read it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from bench.common import MIN_SAMPLES, Results, finish, parser, results_for, so_far
from bench.recovery import cuda
from bench.recovery.cases import (
    LAB_NODES,
    LONG_NODES,
    NO_LEASE,
    NODES,
    NVRX,
    ONE_HOST,
    PER_NODE,
    PREEMPTION,
    REJOINED,
    STEP_TIME,
    WENT_WRONG,
    Case,
    LauncherKill,
    LongJob,
    NodeCrash,
    NvrxInProcess,
    Preempting,
    RankFault,
    ft_launcher,
    lease_tier,
    robust_job,
    torchrun,
)
from bench.recovery.plain import SLURM_CONF, plain_requeue
from bench.recovery.resized import Resized
from bench.training.rank import RAISE
from lab import Cluster, Lab
from robust_slurm.config import Config

PLAIN = "plain_requeue"
WORKLOADS = {
    "toy": (
        "rank_kill",
        "hang",
        "node_crash_spare",
        "node_crash_standby",
        "node_crash_leased_preempt",
        PLAIN,
    ),
    "torch": (
        "rank_kill_torch",
        "rank_kill_torch_cold",
        "rejoin_rank_kill",
        "rejoin_rank_raise",
        "rejoin_rank_hang",
        "rejoin_off_rank_kill",
        "torchrun_kill",
        "nvrx_kill",
        "nvrx_inprocess_kill",
        "nvrx_inprocess_raise",
        "nvrx_inprocess_hang",
        "node_crash_spare_torch",
        "node_crash_standby_torch",
        "node_crash_leased_torch",
    ),
    "saved": ("shrink", "grow"),
}
RATIOS = (  # (slower, faster)
    (PLAIN, "node_crash_spare"),
    (PLAIN, "node_crash_standby"),
    ("torchrun_kill", "rank_kill_torch"),
    ("nvrx_kill", "rank_kill_torch"),
    ("rank_kill_torch_cold", "rank_kill_torch"),
    ("rejoin_off_rank_kill", "rejoin_rank_kill"),
    ("nvrx_inprocess_kill", "rejoin_rank_kill"),
    ("nvrx_inprocess_raise", "rejoin_rank_raise"),
    ("nvrx_inprocess_hang", "rejoin_rank_hang"),
    ("node_crash_standby_torch", "node_crash_leased_torch"),
    ("node_crash_leased_preempt", "node_crash_standby"),
)
QUICK_RUNS = 2
IN_A_ROW = 5
Found = dict[str, list[dict[str, float]]]
"""Seconds by phase for each fault, by case."""


def make_cases(lab: Lab, names: Sequence[str]) -> dict[str, Case]:
    """The chosen cases that take turns in ``lab``."""
    cold = f"--robust-no-warm {NO_LEASE}"
    many = LongJob(lambda: robust_job(lab, "toy", NODES, PER_NODE, LONG_NODES, options=NO_LEASE))
    one = LongJob(lambda: robust_job(lab, "torch", 1, ONE_HOST, "n1", options=NO_LEASE))
    stays = LongJob(lambda: robust_job(lab, "resilient", 1, ONE_HOST, "n1", options=NO_LEASE))
    restarts = f"--robust-rejoin-limit=0 {NO_LEASE}"
    all_new = LongJob(lambda: robust_job(lab, "resilient", 1, ONE_HOST, "n1", options=restarts))
    other = LongJob(lambda: robust_job(lab, "torch", 1, ONE_HOST, "n1", options=cold))
    every: dict[str, Callable[[], Case]] = {
        "rank_kill": lambda: RankFault(many, signal.SIGKILL, warm=True),
        "hang": lambda: RankFault(many, signal.SIGSTOP, warm=True),
        "node_crash_spare": lambda: NodeCrash(lab, "toy", PER_NODE, 1, warm=True),
        "node_crash_standby": lambda: NodeCrash(lab, "toy", PER_NODE, 0, warm=True),
        "rank_kill_torch": lambda: RankFault(one, signal.SIGKILL, warm=True),
        "rank_kill_torch_cold": lambda: RankFault(other, signal.SIGKILL),
        "rejoin_rank_kill": lambda: RankFault(stays, signal.SIGKILL, warm=True, must=REJOINED),
        "rejoin_rank_raise": lambda: RankFault(stays, RAISE, warm=True, must=REJOINED),
        "rejoin_rank_hang": lambda: RankFault(stays, signal.SIGSTOP, warm=True, must=REJOINED),
        "rejoin_off_rank_kill": lambda: RankFault(
            all_new, signal.SIGKILL, warm=True, must={"kept": 0}
        ),
        "torchrun_kill": lambda: LauncherKill(lab, "torch", torchrun()),
        "nvrx_kill": lambda: LauncherKill(lab, "torch", ft_launcher()),
        "nvrx_inprocess_kill": lambda: NvrxInProcess(lab, signal.SIGKILL),
        "nvrx_inprocess_raise": lambda: NvrxInProcess(lab, RAISE),
        "nvrx_inprocess_hang": lambda: NvrxInProcess(lab, signal.SIGSTOP),
        "node_crash_spare_torch": lambda: NodeCrash(lab, "torch", 1, 1, warm=True),
        "node_crash_standby_torch": lambda: NodeCrash(lab, "torch", 1, 0, warm=True),
        "shrink": lambda: Resized(lab, grow=False),
        "grow": lambda: Resized(lab, grow=True),
        "node_crash_leased_torch": lambda: NodeCrash(lab, "torch", 1, 0, warm=True, lease=True),
        "node_crash_leased_preempt": lambda: Preempting(lab),
    }
    return {name: every[name]() for name in names if name in every}


def take_turns(
    names: Sequence[str], runs: int, failed: set[str], after_round: Callable[[Found], None]
) -> Found:
    """Inject each case's fault ``runs`` times; a case that goes wrong is left out from then on.

    A case has a few faults in a row: its training runs while they last, and disturbs no other.
    """
    found: Found = {}
    own = [Path(NVRX).parents[1]] if NVRX else []
    with Cluster(nodes=LAB_NODES, standby=1, visible=own, slurm_conf=PREEMPTION) as lab:
        lease_tier(lab)
        cases = make_cases(lab, names)
        for begin in range(0, runs, IN_A_ROW):
            for name, case in cases.items():
                for run in range(begin, min(begin + IN_A_ROW, runs)):
                    if name not in failed:
                        inject(name, case, f"{run + 1}/{runs}", found, failed)
                try:
                    case.close()
                except WENT_WRONG as error:  # the lab's end ends it too
                    tell(f"{name}, at its end: {error}")
            after_round(found)
    return found


def inject(name: str, case: Case, which: str, found: Found, failed: set[str]) -> None:
    """One fault."""
    try:
        phases = case.once()
    except WENT_WRONG as error:
        failed.add(name)
        tell(f"{name} {which}: {error}")
        return
    found.setdefault(name, []).append(phases)
    tell(f"{name} {which}: {cuda.shown(phases)}")


def measure(results: Results, names: Sequence[str], file: Path | None = None) -> bool:
    """Run the cases and add their metrics; False if a case went wrong.

    ``file`` gets the results after each round as well, marked as quick: a run of an hour may end
    before its time.
    """
    results.settings |= {
        "hang_floor_s": Config().hang_floor,
        PLAIN: " ".join(f"{key}={value}" for key, value in SLURM_CONF.items()),
        "ranks": f"{NODES}x{PER_NODE}; torch on one host: {ONE_HOST}; torch node crash: {NODES}x1",
        "step_time_s": STEP_TIME,
    }
    if NVRX:
        results.settings["nvrx"] = nvrx_version()
    runs = results.runs or (QUICK_RUNS if results.quick else MIN_SAMPLES)
    failed: set[str] = set()
    in_turn = [name for name in names if name != PLAIN]

    def after_round(found: Found) -> None:
        part = replace(results, quick=True, metrics={}, ratios={})
        add(part, {name: rows for name, rows in found.items() if name not in failed})
        so_far(part, set(part.metrics), file)

    found: Found = {}
    with ThreadPoolExecutor(1) as pool:
        waiting: Future[list[dict[str, float]]] | None = None
        if PLAIN in names and results.quick:  # its waiting may disturb the others: only then
            waiting = pool.submit(plain_requeue, runs, tell)
        if in_turn:
            found |= take_turns(in_turn, runs, failed, after_round)
        if PLAIN in names:
            waiting = waiting or pool.submit(plain_requeue, runs, tell)
            try:
                found[PLAIN] = waiting.result()
            except (*WENT_WRONG, ValueError) as error:
                failed.add(PLAIN)
                tell(f"{PLAIN}: {error}")
    add(results, {name: found[name] for name in names if found.get(name) and name not in failed})
    return not failed


def add(results: Results, found: Found) -> None:
    """Add the metrics of the cases, and the ratios of those that stand side by side."""
    for name, samples in found.items():
        for phase in samples[0]:
            results.add(f"{name}.{phase}_s", [s[phase] for s in samples], "s")
    for slower, faster in RATIOS:
        if {f"{slower}.total_s", f"{faster}.total_s"} <= results.metrics.keys():
            results.ratio(f"{slower}/{faster}", f"{slower}.total_s", f"{faster}.total_s")


def nvrx_version() -> str:
    """Return the version of the package that BENCH_NVRX belongs to."""
    code = "import importlib.metadata as m; print(m.version('nvidia-resiliency-ext'))"
    argv = [str(Path(NVRX).with_name("python")), "-c", code]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()


def tell(text: str) -> None:
    """Progress, for a run that takes half an hour."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when a case could not be measured."""
    every = [name for names in WORKLOADS.values() for name in names]
    options = parser("recovery", every)
    options.add_argument("--workload", choices=[*WORKLOADS, "both"], default="both")
    options.add_argument("--cuda", action="store_true", help="a job on this machine's GPU, ≤ 6 min")
    args = options.parse_args(argv)
    if args.cuda:
        return cuda.run(results_for("recovery", args), args)
    names = every if args.workload == "both" else WORKLOADS[args.workload]
    if not NVRX:
        if any(name.startswith("nvrx_") for name in args.case or []):
            options.error("nvrx_*: BENCH_NVRX must be the path of an ft_launcher")
        names = [name for name in names if not name.startswith("nvrx_")]
    results = results_for("recovery", args)
    fine = measure(results, args.case or names, args.json)
    return finish(results, args) or (0 if fine else 1)


if __name__ == "__main__":
    raise SystemExit(main())
