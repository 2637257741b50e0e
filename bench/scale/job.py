"""A job of hundreds of real tasks under robust-srun: one rank and then one node is lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.common import BenchError, Results
from bench.scale import usage
from bench.training.job import Training, find_rank
from lab import Cluster
from lab.keeper.ranks import scan
from srun_wrapper.decide.incident import PHASES

STEP_S = 1.0
SPARES = 2
START_S = 420.0
RECOVERY_S = 300.0
STEADY_S = 15.0
_MOST_MB = 400.0  # left of the machine's memory when the job is given up
# Hundreds of tasks share two cores here; on a cluster each node has its own.
OPTIONS = (
    *(f"--robust-spares={SPARES}", "--robust-no-warm", "--robust-no-checkpoint"),
    *("--robust-stop-tests=0", "--robust-task-start-limit=400", "--robust-launch-limit=200"),
    *("--robust-stop-margin=60", "--robust-outage-wait=10", "--robust-mute-limit=60"),
)
# No slurmstepd a node for the job's containment; and nodes that share two cores answer in turn.
SLURM_CONF = {"PrologFlags": "Alloc", "MessageTimeout": "60"}


@dataclass(slots=True)
class LargeJob(Training):
    """A training whose ranks are bench/scale/rank.c."""

    per_node: int = 1

    def start(self) -> None:
        """Compile the rank and submit the job."""
        program = self.directory / "rank"
        source = Path(__file__).with_name("rank.c")
        subprocess.run(["cc", "-O2", "-o", str(program), str(source)], check=True)
        program.chmod(0o755)
        lines = ["#!/bin/bash", *(f"export {k}={v}" for k, v in self.env().items())]
        command = f"{program} {self.directory} {STEP_S:g}"
        lines += [f"exec robust-srun {' '.join(OPTIONS)} {command}", ""]
        nodes = self.world // self.per_node + SPARES
        output = ["-o", str(self.directory / "output"), "-D", str(self.directory)]
        size = [f"-N{nodes}", f"--ntasks-per-node={self.per_node}", "--no-kill"]
        self.job = self.lab.sbatch("\n".join(lines), [*output, *size])

    def supervisor(self) -> int:
        """The pid of robust-srun. BenchError if it does not run."""
        for pid in usage.find("robust-srun", {"BENCH_TOKEN": self.token}):
            return pid
        raise BenchError(f"{self.directory}: robust-srun does not run")

    def wait_stepped(self, since: float, limit: float) -> float:
        """Wait for the first step after ``since`` of all ranks; the wall time of the last one."""
        until = time.monotonic() + limit
        while len(found := self.first_steps(since)) < self.world:
            if time.monotonic() > until or usage.available_mb() < _MOST_MB:
                text = (self.directory / "output").read_text(errors="replace")[-3000:]
                left = f"{usage.available_mb():.0f} MB of memory are left"
                raise BenchError(f"{len(found)} of {self.world} ranks step; {left}\n{text}")
            time.sleep(0.25)
        return max(found.values())


def job(results: Results, ranks: int, per_node: int, tell: Callable[[str], None]) -> None:
    """Start the job, watch it, kill a rank, crash a node; times, memory and CPU."""
    nodes = ranks // per_node + SPARES
    results.settings |= {"ranks": f"{ranks // per_node}x{per_node}", "options": " ".join(OPTIONS)}
    with Cluster(nodes=nodes, standby=0, cpus=per_node, slurm_conf=SLURM_CONF) as lab:
        tell(f"{nodes} nodes are up; {usage.available_mb():.0f} MB of memory are left")
        others, before = usage.pids(), usage.available_mb()
        large = LargeJob.new(lab, "scale", ranks)
        large.per_node = per_node
        began = time.time()
        large.start()  # the lab's end ends it
        results.once("job.start_s", large.wait_stepped(began, START_S) - began, "s")
        tell(f"all {ranks} ranks step after {results.metrics['job.start_s'].median:.0f} s")
        results.once("job.memory_mb", before - usage.available_mb(), "MB")
        steady(results, large.supervisor(), others, tell)
        began = time.time()
        words = ["robust-status", str(large.job), "--state-dir", str(large.directory / "state")]
        lab.exec("head", words, check=True)
        results.once("job.robust_status_s", time.time() - began, "s")
        recover(results, large, "rank_kill", "restart", lambda: kill_rank(large), tell)
        crash = lambda: lab.crash(f"n{nodes // 2}")  # noqa: E731
        recover(results, large, "node_crash", "swap_spare", crash, tell)
        peak = usage.rss_mb(large.supervisor(), key="VmHWM")
        results.once("job.supervisor_peak_mb", peak, "MB")


def steady(results: Results, pid: int, others: set[int], tell: Callable[[str], None]) -> None:
    """Measure while nothing happens: what it costs robust-srun, and the job's processes."""
    time.sleep(5.0)
    cpu, at = usage.cpu_s(pid), time.monotonic()
    time.sleep(STEADY_S)
    spent = (usage.cpu_s(pid) - cpu) / (time.monotonic() - at)
    results.once("job.supervisor_cpu_percent", 100 * spent, "% of a core")
    results.once("job.supervisor_mb", usage.rss_mb(pid), "MB")
    for name, group in sorted(usage.by_name(without=others).items()):
        if group.number > 1:
            results.once(f"job.{name}_mb_each", group.mb / group.number, "MB")
            tell(f"{group.number} {name}: {group.mb:.0f} MB")


def recover(
    results: Results,
    large: LargeJob,
    case: str,
    action: str,
    fault: Callable[[], float],
    tell: Callable[[str], None],
) -> None:
    """One fault, until robust-srun calls it recovered: seconds by phase, and its CPU time."""
    known = len(large.incidents())
    pid = large.supervisor()
    cpu = usage.cpu_s(pid)
    at = fault()
    end = large.wait_stepped(at, RECOVERY_S)
    large.wait(lambda: len(large.incidents()) > known, f"{case}: no incident")
    found = large.incidents()[known:]
    if [one.action for one in found] != [action]:
        raise BenchError(f"{case}: {[one.action for one in found]} where {action} was expected")
    results.once(f"{case}.detect_s", found[0].detected - at, "s")
    for phase in PHASES[1:]:
        if seconds := found[0].phases.get(phase, 0.0):
            results.once(f"{case}.{phase}_s", seconds, "s")
    results.once(f"{case}.total_s", end - at, "s")
    results.once(f"{case}.supervisor_cpu_s", usage.cpu_s(pid) - cpu, "s")
    tell(f"{case}: {end - at:.1f} s, {shown(found[0].phases)}")


def shown(phases: Mapping[str, float]) -> str:
    """The phases that took time."""
    return ", ".join(f"{name} {took:.2f}" for name, took in phases.items() if took >= 0.005)


def kill_rank(large: LargeJob) -> float:
    """SIGKILL to a rank of the second half; the wall time of just before."""
    rank = large.world * 3 // 4
    pid = find_rank(scan(), large.token, rank)
    if pid is None:
        raise BenchError(f"no process of rank {rank} is running")
    at = time.time()
    subprocess.run(["kill", "-KILL", str(pid)], check=True)
    return at


def sizes(text: str) -> tuple[int, int]:
    """Ranks and ranks a node, from "600x4"."""
    ranks, _, per_node = text.partition("x")
    return int(ranks), int(per_node or "1")
