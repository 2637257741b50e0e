"""Cost of saving every step, and speed of restoring: ``python -m bench.checkpoint`` (root).

Case ``save``: a training that saves its whole state after every step, with our Checkpointer and
with others, each beside the same steps without saving and a plain memcpy of the same bytes. Case
``restore``: a rank that died comes back from its own node's memory, and from a peer node's beside
plain TCP. Case ``commit``: a durable step of 9,600 simulated ranks is committed. Case ``loops``:
random training loops that are killed (``bench.checkpoint.loops``). Case ``battery``: training loops
as trainers write them, of many kinds (``bench.checkpoint.battery``). Case ``overhead``: saving over
a link that is too slow for every step (``bench.checkpoint.overhead``). ``--peers`` also measures
DLRover and NVRx, for which it makes an environment. ``--cuda``: see ``bench.checkpoint.cuda``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from bench.checkpoint import job
from bench.checkpoint.battery.judging import BAD
from bench.checkpoint.battery.trying import battery as try_battery
from bench.checkpoint.commit import commit as commit_step
from bench.checkpoint.cuda import cases as cuda
from bench.checkpoint.loops.trying import loops as try_loops
from bench.checkpoint.nodes import Nodes, run_json, scratch
from bench.checkpoint.overhead import overhead as measure_overhead
from bench.checkpoint.restore import replica, restore_own, restore_peer
from bench.checkpoint.saving.peers import SAVERS as PEER_SAVERS
from bench.checkpoint.saving.peers import Peers
from bench.checkpoint.work import SIZES
from bench.common import MIN_SAMPLES, BenchError, Results, finish, parser, results_for
from lab import LabError

QUICK_RUNS = 2
MEMORY = 11
"""Times the state's size that a case may take: the training and two nodes' snapshots."""
RANKS_IN_JOB = 2
OWN = {"save": 1, "save_replica": 1, "save_busy": 0}
"""Our ways to save → threads of the training; 0: as many as there are cores."""
OTHERS = ("torch_save", "dcp_async")
JOBS = {"job": "--robust-checkpoint-overhead=0", "job_default": ""}
"""The case in a job → robust-srun's option: every step is saved at any cost, or only as many as
``checkpoint_overhead`` allows, so that not each step of those that save is saved."""
WENT_WRONG = (BenchError, LabError, OSError, subprocess.SubprocessError)


class Bench:
    """One run: sizes, runs, what was found and what could not be measured."""

    def __init__(
        self,
        results: Results,
        sizes: Sequence[str],
        peers: Peers | None,
        savers: Sequence[str] = (),
    ) -> None:
        """``savers``: the only ways to save, if there are any."""
        self.results = results
        self.sizes = sizes
        self.peers = peers
        self.savers = savers
        self.runs = results.runs or (QUICK_RUNS if results.quick else MIN_SAMPLES)
        self.failed: list[str] = []
        self.seed, self.large = 0, False
        """Cases ``loops`` and ``battery``: the first seed; and the size of the loops' states."""
        self.only: Sequence[str] = ()
        """Case ``battery``: kinds or families."""

    def attempt(self, name: str, call: Any, *args: Any) -> None:
        """Measure something; what goes wrong is told and its metrics are left out."""
        tell(name)
        try:
            call(*args)
        except WENT_WRONG as error:
            self.failed.append(name)
            tell(f"{name}: {error}")

    def room(self, name: str, size: str, times: int = MEMORY) -> bool:
        """Return whether there is memory for a case of so many times ``size``; print if not."""
        need, there = times * SIZES[size], available()
        if need > there:
            why = f"takes {need / 1e9:.0f} GB of memory, {there / 1e9:.0f} GB are available"
            self.results.settings[f"not measured: {name}_{size}"] = why
            tell(f"{name}_{size} is left out: it {why}")
        return need <= there


def tell(text: str) -> None:
    """Progress, for a run that takes half an hour."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def available() -> int:
    """Bytes that may be used, in memory and in /dev/shm."""
    shm = os.statvfs("/dev/shm")
    with open("/proc/meminfo", encoding="ascii") as lines:
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    return min(free, shm.f_bavail * shm.f_frsize)


def save(bench: Bench) -> None:
    """Blocked time and step time, for every size and way to save."""
    others = [*OTHERS, *(bench.peers.savers() if bench.peers else ())]
    for size in bench.sizes:
        if not bench.room("save", size):
            continue
        for name in (*OWN, *others):
            if not bench.savers or name in bench.savers:
                call = save_own if name in OWN else save_other
                bench.attempt(f"{name}_{size}", call, bench, name, size)


def save_own(bench: Bench, name: str, size: str) -> None:
    threads = OWN[name] or len(os.sched_getaffinity(0))
    saver = "save" if name == "save" else "save_replica"
    with Nodes() as nodes:
        if saver == "save_replica":
            nodes.replicate(0)
        env = {"ROBUST_CKPT_SOCKET": nodes.sockets[0]}
        found = driver(sys.executable, saver, size, bench.runs, threads, nodes.directory, env)
        if alarms := nodes.alarms():
            raise BenchError("; ".join(alarms))
    add(bench.results, name, size, found, threads)


def save_other(bench: Bench, name: str, size: str) -> None:
    in_peers = bench.peers is not None and name in bench.peers.savers()
    python = str(bench.peers.python) if bench.peers and in_peers else sys.executable
    with scratch() as directory:
        found = driver(python, name, size, bench.runs, 1, directory, {})
    add(bench.results, name, size, found, 1)


def driver(
    python: str,
    saver: str,
    size: str,
    runs: int,
    threads: int,
    directory: Path,
    env: dict[str, str],
) -> dict[str, Any]:
    """Run bench.checkpoint.saving.driver; what it measured."""
    argv = [python, "-m", "bench.checkpoint.saving.driver", saver, str(SIZES[size]), str(runs)]
    env = {"OMP_NUM_THREADS": str(threads), **env}
    return run_json([*argv, str(threads), str(directory)], env)


def add(results: Results, name: str, size: str, found: dict[str, Any], threads: int) -> None:
    """Metrics of one way to save; those of memcpy are the first one's, its ratio is its own's."""
    case = f"{name}_{size}"
    results.add(f"{case}.blocked_s", found["blocked"], "s")
    for key, samples in found["extra"].items():
        results.add(f"{case}.{key}", samples, "s")
    results.add(f"{case}.step_s", found["with"], "s")
    results.add(f"{case}.plain_step_s", found["without"], "s")
    results.add(f"{case}.step_ratio", found["paired"], "ratio")
    results.add(f"{case}.memcpy_s", found["memcpy"], "s")
    results.ratio(f"{case}.blocked/memcpy", f"{case}.blocked_s", f"{case}.memcpy_s")
    if name == "save":
        results.add(f"memcpy_{size}.s", found["memcpy"], "s")
    results.settings[name] = f"{found['note']}; {threads} of {cores()} cores for the training"
    results.settings[f"load after {case}"] = round(os.getloadavg()[0], 1)
    results.settings[f"state_{size}"] = f"{found['nbytes']} bytes in {found['tensors']} tensors"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def in_job(bench: Bench) -> None:
    """The same in a real job of two ranks, which share the machine's cores."""
    for size in bench.sizes:
        if bench.room("job", size, RANKS_IN_JOB * MEMORY):
            for name in JOBS:
                bench.attempt(f"{name}_{size}", save_in_job, bench, name, size)


def save_in_job(bench: Bench, name: str, size: str) -> None:
    ranks = job.run(SIZES[size], bench.runs, JOBS[name])
    merged = {**ranks[0], "extra": {}}
    for key in ("blocked", "with", "without", "paired", "memcpy"):
        merged[key] = [value for rank in ranks for value in rank[key]]
    add(bench.results, name, size, merged, 1)
    bench.results.settings[f"{name}_{size}"] = f"snapshots: {ranks[0]['taken']}"
    # The median step of those that save may be one that is not saved.
    bench.results.ratios[f"{name}_{size}: all steps with/without"] = sum(merged["with"]) / sum(
        merged["without"]
    )


def restore(bench: Bench) -> None:
    """Restore from a node's own memory, and from its peer's beside plain TCP."""
    for size in bench.sizes:
        if bench.room("restore", size):
            for case in (restore_own, restore_peer, replica):
                name = f"{case.__name__}_{size}"
                bench.attempt(name, case, bench.results, name, SIZES[size], bench.runs)


def commit(bench: Bench) -> None:
    """A step of thousands of ranks is made to count."""
    bench.attempt("commit", commit_step, bench.results)


def loops(bench: Bench) -> None:
    """Random training loops, killed and resumed: identical, warned of, silently wrong, failed."""
    found = try_loops(bench.results, tell, bench.seed, bench.large)
    if any(one.outcome in ("silent", "failed") for one in found):
        bench.failed.append("loops")


def battery(bench: Bench) -> None:
    """Many kinds of training loops, killed and resumed."""
    found = try_battery(bench.results, tell, bench.seed, bench.only)
    broken = bench.results.metrics["battery.broken"].median
    if broken or any(one.outcome in BAD for one in found):
        bench.failed.append("battery")


def overhead(bench: Bench) -> None:
    """Saving over a slow link, before and after fewer steps are saved."""
    bench.attempt("overhead", measure_overhead, bench.results)


CASES = {
    "save": save, "job": in_job, "restore": restore, "commit": commit, "loops": loops,
    "battery": battery, "overhead": overhead,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when something could not be measured."""
    options = parser("checkpoint", CASES)
    choices = SIZES | cuda.CUDA_SIZES
    options.add_argument("--size", action="append", choices=choices, help="only this (repeatable)")
    options.add_argument("--peers", action="store_true", help="DLRover and NVRx too (pip installs)")
    savers = (*OWN, *OTHERS, *chain.from_iterable(PEER_SAVERS.values()))
    options.add_argument(
        "--saver", action="append", choices=savers, help="case save: only this (repeatable)"
    )
    options.add_argument(
        "--cuda", action="store_true", help="run on this machine's GPU instead, 8 minutes"
    )
    options.add_argument("--seed", type=int, default=0, help="cases loops and battery [default: 0]")
    options.add_argument(
        "--kind", action="append", help="case battery: only this kind or family (repeatable)"
    )
    options.add_argument(
        "--large", action="store_true", help="case loops: with states of 8 to 30 MB"
    )
    args = options.parse_args(argv)
    if not args.peers and (alone := set(args.saver or ()).difference(OWN, OTHERS)):
        options.error(f"--saver {', '.join(sorted(alone))}: only with --peers")
    possible = cuda.CUDA_SIZES if args.cuda else SIZES
    if unknown := set(args.size or ()).difference(possible):
        options.error(f"--size {', '.join(sorted(unknown))}: choose from {', '.join(possible)}")
    results = results_for("checkpoint", args)
    if args.cuda:
        return cuda.run(results, args)
    peers = Peers() if args.peers else None
    for peer, version in (peers.versions if peers else {}).items():
        results.settings[peer] = version
    for peer, why in (peers.missing if peers else {}).items():
        results.settings[f"not measured: {peer}"] = why
    sizes = args.size or (list(SIZES)[:1] if args.quick else list(SIZES))
    bench = Bench(results, sizes, peers, args.saver or ())
    bench.seed, bench.large, bench.only = args.seed, args.large, args.kind or ()
    for case in args.case or CASES:
        CASES[case](bench)
    return finish(results, args) or (1 if bench.failed else 0)


if __name__ == "__main__":
    raise SystemExit(main())
