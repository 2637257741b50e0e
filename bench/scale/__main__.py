"""Measure what large numbers of nodes and ranks cost: ``python -m bench.scale`` (root).

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
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from health.gate.breaker import Drain
from health.settings_file import END
from lab import Cluster
from lab.slurm.controller import Controller
from lab.slurm.records import parse_nodes, parse_state
from lab.spec import HEAD

NODES, MANY, JOB = 1200, 10_000, "600x4"
QUICK_NODES, QUICK_MANY, QUICK_JOB = 20, 100, "8x2"
FAULTS = 100
SOFT = "robust:node:ib-down:mlx5_0:none:job0"
HARD = "robust:node:gpu-lost:gpu3:reboot:job0"
WIDE = "max_nodes = 10000\nmax_percent = 100.0\nstanding_percent = 100.0\n"
OLD = 10_000  # drains on record from last week: a ledger of years
DRAINS = {
    "limited": (SOFT, "", 0),
    "limited_hard": (HARD, "", 0),
    "limited_old": (SOFT, "", OLD),
    "raised": (SOFT, WIDE, 0),
    "limited_gate": (SOFT, "", 0),
    "limited_hard_gate": (HARD, "", 0),
}
OWN_TIMES = "_gate"  # the end of the name of a case with the gate's own limits of time
LIMIT_S = 240.0


def tell(text: str) -> None:
    """Print progress."""
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Slurm:
    """A slurmctld to ask. ``way``: what runs a command there, as root, and the environment."""

    way: Callable[[list[str]], tuple[list[str], Mapping[str, str]]]
    conf: str
    place: Path
    """A directory of root's that is reached from there."""
    names: str
    """The letter before the nodes' numbers."""

    def run(self, argv: list[str]) -> str:
        """Run a command; its output. BenchError if it fails."""
        words, env = self.way(argv)
        done = subprocess.run(
            words, env=env, cwd=REPOSITORY, capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise BenchError(f"{' '.join(argv)[:100]}: {(done.stderr or done.stdout)[-2000:]}")
        return done.stdout


def in_head(lab: Cluster) -> Slurm:
    """The slurmctld of a lab."""
    conf = lab.spec.dir / "etc" / "slurm.conf"
    env = lab.environ(user=False)
    way = lambda argv: (lab.entry(HEAD, argv, user=False, cwd=REPOSITORY), env)  # noqa: E731
    return Slurm(way, str(conf), lab.spec.dir / "site", "n")


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
        slurm = in_head(lab)
        status(results, "status_real", slurm, count)
        which = ("limited", "raised", "limited_gate")
        drains(results, "drain_real", slurm, min(FAULTS, count), which)
        ending = time.monotonic()
    results.once("lab.down_s", time.monotonic() - ending, "s")
    tell(f"gone after {results.metrics['lab.down_s'].median:.1f} s")


def many(results: Results, count: int) -> None:
    """robust-status and drains where the nodes have no slurmd."""
    with Controller(count) as controller, tempfile.TemporaryDirectory(dir="/root") as place:
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        env = {**os.environ, **controller.env, "PATH": path}
        slurm = Slurm(lambda argv: (argv, env), controller.env["SLURM_CONF"], Path(place), "c")
        status(results, f"status_{count}", slurm, count)
        drains(results, f"drain_{count}", slurm, min(FAULTS, count), tuple(DRAINS))


def status(results: Results, case: str, slurm: Slurm, count: int) -> None:
    """Wall time and memory of robust-status, beside sinfo and the way there alone."""
    records = slurm.place / "records"
    (records / "jobs").mkdir(parents=True)
    shown = ["robust-status", "--state-dir", str(records)]
    commands = {
        "way": ["true"],
        "sinfo": ["sinfo", "-N"],
        "robust_status": shown,
        "robust_status_json": [*shown, "--json"],
    }
    found: dict[str, list[float]] = {name: [] for name in commands}
    for run in range(_runs(results) + 1):
        for name, words in commands.items():
            began = time.perf_counter()
            slurm.run(words)
            if run:  # the first warms caches
                found[name].append((time.perf_counter() - began) * 1000)
    for name, samples in found.items():
        results.add(f"{case}.{name}_ms", samples, "ms")
    results.once(f"{case}.robust_status_mb", _peak_mb(*slurm.way(shown)), "MB")
    tell(f"robust-status over {count} nodes: {results.metrics[f'{case}.robust_status_ms']}")


def _peak_mb(argv: Sequence[str], env: Mapping[str, str]) -> float:
    """The most memory that the largest process of a command had."""
    silent = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    program = shutil.which(argv[0], path=env.get("PATH")) or argv[0]
    pid = os.posix_spawn(program, list(argv), dict(env), file_actions=silent)
    used: resource.struct_rusage = os.wait4(pid, 0)[2]
    return used.ru_maxrss * 1024 / 1e6


def drains(results: Results, case: str, slurm: Slurm, count: int, names: Sequence[str]) -> None:
    """Drain ``count`` nodes at once, under each of these limits."""
    for name in names:
        reason, limits, old = DRAINS[name]
        drain(results, f"{case}_{name}", slurm, count, reason, limits, old)


def drain(
    results: Results, case: str, slurm: Slurm, count: int, reason: str, limits: str, old: int
) -> None:
    """Count the nodes drained, and time each gate; ``old``: drains of last week on record."""
    ledger = slurm.place / "state" / "nodes"
    ledger.mkdir(mode=0o755, parents=True)
    week = time.time() - 7 * 86_400
    lines = [json.dumps(Drain(week, f"x{one}", 0, "network")._asdict()) for one in range(old)]
    (ledger / "drains.jsonl").write_text("".join(f"{line}\n" for line in lines))
    toml = slurm.place / "robust.toml"
    gates = case.endswith(OWN_TIMES)
    spool = f'[gate]\nspool = "{slurm.place / "spool"}"\n'
    spool += "" if gates else "scontrol_deadline = 60.0\n"
    toml.write_text(f'state_dir = "{slurm.place / "state"}"\n{spool}[breaker]\n{limits}\n{END}\n')
    (pid,) = usage.find("slurmctld", {"SLURM_CONF": slurm.conf})
    cpu, began = usage.cpu_s(pid), time.monotonic()
    words = ["-m", "bench.scale.drains", slurm.names, str(count), str(toml), reason]
    words += [OWN_TIMES] if gates else []
    text = slurm.run([sys.executable, *words])
    took = time.monotonic() - began
    found = [json.loads(line) for line in text.splitlines()]
    results.metrics[f"{case}.each_s"] = summarise([float(one["seconds"]) for one in found], "s")
    results.once(f"{case}.all_s", took, "s")
    results.once(f"{case}.slurmctld_cpu_s", usage.cpu_s(pid) - cpu, "s")
    for how in ("drained", "bound", "failed"):
        results.count(f"{case}.{how}", sum(one["how"] == how for one in found))
    results.count(f"{case}.without_ledger", sum(bool(one["note"]) for one in found))
    shown = parse_nodes(slurm.run(["scontrol", "show", "nodes", "-o"])).values()
    stand = sum("DRAIN" in parse_state(record["State"]) for record in shown)
    results.count(f"{case}.stand", stand)
    tell(f"{case}: {stand} of {count} stand drained after {took:.1f} s")
    for line in sorted({one[key] for one in found for key in ("note", "error") if one[key]})[:5]:
        tell(f"  {line}")
    slurm.run(["scontrol", "update", f"nodename={slurm.names}[1-{count}]", "state=undrain"])
    shutil.rmtree(slurm.place / "state")


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
