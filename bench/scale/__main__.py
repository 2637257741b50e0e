"""How much one machine holds, and what is slow when it is much: ``python -m bench.scale`` (root).

Case ``nodes``: a lab of 1,200 nodes, each with its slurmd in namespaces of its own: the time until
all are registered and until all is gone, the memory; robust-status on it; and the gate's drain on
100 nodes at once, within the circuit breaker's limits and with the limits raised. Case ``many``:
robust-status over 10,000 nodes of a real slurmctld that have no slurmd. Case ``job``: a job of 600
ranks under robust-srun that loses a rank and then a node.

What a run does only once has one sample: read it as an order of magnitude.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bench.common import (
    MIN_SAMPLES,
    REPOSITORY,
    BenchError,
    Results,
    finish,
    parser,
    results_for,
    summarise,
)
from bench.scale import usage
from bench.scale.job import job, sizes
from lab import Cluster
from lab.slurm.controller import Controller
from lab.spec import HEAD

NODES, MANY, JOB = 1200, 10_000, "600x4"
QUICK_NODES, QUICK_MANY, QUICK_JOB = 20, 100, "8x2"
FAULTS = 100
SOFT = "robust:node:ib-down:mlx5_0:none:job0"
HARD = "robust:node:gpu-lost:gpu3:reboot:job0"
WIDE = "max_nodes = 10000\nmax_percent = 100.0\nstanding_percent = 100.0\n"
DRAINS = {"limited": (SOFT, ""), "limited_hard": (HARD, ""), "raised": (SOFT, WIDE)}
LIMIT_S = 240.0


def tell(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def nodes(results: Results, count: int) -> None:
    """The lab itself, robust-status on it, and drains."""
    others = usage.pids()
    before, began = usage.available_mb(), time.monotonic()
    with Cluster(nodes=count, standby=0) as lab:
        results.once("lab.up_s", time.monotonic() - began, "s")
        tell(f"{count} nodes after {results.metrics['lab.up_s'].median:.1f} s")
        results.once("lab.memory_mb", before - usage.available_mb(), "MB")
        for name, group in sorted(usage.by_name(without=others).items()):
            if group.number >= count or name in ("slurmctld", "munged"):
                results.once(f"lab.{name}_mb_each", group.mb / group.number, "MB")
        status(results, "status_real", partial(_in_head, lab), count)
        for name, (reason, limits) in DRAINS.items():
            drains(results, lab, name, reason, limits, min(FAULTS, count))
        ending = time.monotonic()
    results.once("lab.down_s", time.monotonic() - ending, "s")
    tell(f"gone after {results.metrics['lab.down_s'].median:.1f} s")


def many(results: Results, count: int) -> None:
    """robust-status on nodes that have no slurmd."""
    with Controller(count) as controller:
        env = {**os.environ, **controller.env}
        run = lambda argv: (argv, env)  # noqa: E731
        status(results, f"status_{count}", run, count)


Way = Callable[[list[str]], tuple[list[str], Mapping[str, str]]]
"""From a command to what runs it where Slurm answers, and the environment for that."""


def _in_head(lab: Cluster, argv: list[str]) -> tuple[list[str], Mapping[str, str]]:
    return lab.entry(HEAD, argv), lab.environ()


def status(results: Results, case: str, way: Way, count: int) -> None:
    """Wall time and memory of robust-status, beside sinfo and the way there alone."""
    commands = {
        "way": ["true"],
        "sinfo": ["sinfo", "-N"],
        "robust_status": ["robust-status"],
        "robust_status_json": ["robust-status", "--json"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(_runs(results) + 1):
        for name, words in commands.items():
            argv, env = way(words)
            began = time.perf_counter()
            done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT_S)
            took = (time.perf_counter() - began) * 1000
            if done.returncode != 0:
                raise BenchError(f"{words[0]}: {(done.stderr or done.stdout)[-1000:]}")
            if run:  # the first warms caches
                found[name].append(took)
    for name, samples in found.items():
        results.add(f"{case}.{name}_ms", samples, "ms")
    argv, env = way(["robust-status"])
    results.once(f"{case}.robust_status_mb", _peak_mb(argv, env), "MB")
    tell(f"robust-status over {count} nodes: {results.metrics[f'{case}.robust_status_ms']}")


def _peak_mb(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """The most memory that the largest process of a command had."""
    pid = os.posix_spawnp(
        argv[0], list(argv), dict(env), file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, 1, 0)]
    )
    used: resource.struct_rusage = os.wait4(pid, 0)[2]
    return used.ru_maxrss * 1024 / 1e6


def drains(results: Results, lab: Cluster, name: str, reason: str, limits: str, count: int) -> None:
    """Drain ``count`` nodes at once; how many were, and how long each took."""
    site = lab.spec.dir / "site"
    (site / "state" / "nodes").mkdir(mode=0o755, parents=True, exist_ok=True)
    toml = site / "robust.toml"
    toml.write_text(
        f'state_dir = "{site / "state"}"\n[gate]\nspool = "{site / "spool"}"\n[breaker]\n{limits}'
    )
    words = ["-m", "bench.scale.drains", str(count), str(toml), reason]
    controller = usage.find("slurmctld", {"SLURM_CONF": str(lab.spec.dir / "etc" / "slurm.conf")})
    cpu = usage.cpu_s(controller[0])
    began = time.monotonic()
    done = lab.exec(HEAD, [sys.executable, *words], user=False, cwd=REPOSITORY, timeout=LIMIT_S)
    took = time.monotonic() - began
    if done.returncode != 0:
        raise BenchError(f"bench.scale.drains: {done.stderr[-2000:]}")
    found = [json.loads(line) for line in done.stdout.splitlines()]
    seconds = [float(one["seconds"]) for one in found]
    results.metrics[f"drain_{name}.each_s"] = summarise(seconds, "s")
    results.once(f"drain_{name}.all_s", took, "s")
    results.once(f"drain_{name}.slurmctld_cpu_s", usage.cpu_s(controller[0]) - cpu, "s")
    for how in ("drained", "bound", "failed"):
        results.count(f"drain_{name}.{how}", sum(one["how"] == how for one in found))
    without = [one["note"] for one in found if one["note"]]
    results.count(f"drain_{name}.without_ledger", len(without))
    stand = sum("DRAIN" in state for state in lab.nodes().values())
    results.count(f"drain_{name}.stand", stand)
    tell(f"drain_{name}: {stand} of {count} stand drained after {took:.1f} s")
    for text in sorted({*without, *(one["error"] for one in found if one["error"])})[:5]:
        tell(f"  {text}")
    undo = f"scontrol update nodename=n[1-{count}] state=resume"
    lab.exec(HEAD, ["sh", "-c", f"{undo}; rm -r {site}/state"], user=False, timeout=LIMIT_S)


def _runs(results: Results) -> int:
    return results.runs or (3 if results.quick else MIN_SAMPLES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the chosen cases. Returns the exit code."""
    options = parser("scale", ["nodes", "many", "job"])
    options.add_argument("--nodes", type=int, help=f"of the lab (default {NODES})")
    options.add_argument("--many", type=int, help=f"without a slurmd (default {MANY})")
    options.add_argument("--job", metavar="RxN", help=f"ranks x ranks a node (default {JOB})")
    args = options.parse_args(argv)
    results = results_for("scale", args)
    cases: dict[str, Callable[[], None]] = {
        "nodes": lambda: nodes(results, args.nodes or (QUICK_NODES if args.quick else NODES)),
        "many": lambda: many(results, args.many or (QUICK_MANY if args.quick else MANY)),
        "job": lambda: job(results, *sizes(args.job or _job(args)), tell),
    }
    for name in args.case or cases:
        cases[name]()
    return finish(results, args)


def _job(args: argparse.Namespace) -> str:
    return QUICK_JOB if args.quick else JOB


if __name__ == "__main__":
    raise SystemExit(main())
