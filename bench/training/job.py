"""A training that runs in the lab, as the benchmark sees it: its steps, its ranks, its incidents.

The workloads' wall clocks and the benchmark's are one: all nodes of the lab are on this machine.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from bench.common import REPOSITORY, BenchError
from bench.training.rank import FIRST_STEPS, STEP
from lab import Lab
from lab.keeper.ranks import Process, scan

MODULE = {
    name: f"bench.training.{name}_train"
    for name in ("toy", "torch", "saved", "resilient", "device", "nvrx", "torchft")
}
POLL = 0.01
START_UP = 300.0


@dataclass(frozen=True, slots=True)
class Incident:
    """One line of incidents.jsonl. ``detected``: wall time; phases in seconds.

    ``warm``, ``kept``: ranks that started warm, and that stayed in their process.
    """

    detected: float
    action: str
    outcome: str
    phases: Mapping[str, float]
    rung: str = ""
    warm: int = 0
    kept: int = 0


@dataclass(slots=True)
class Training:
    """One run of a workload in ``directory``, which all nodes share."""

    lab: Lab
    workload: str
    world: int
    directory: Path
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    job: int = 0
    more: Sequence[str] = ()
    """Options of the workload besides."""
    environ: Mapping[str, str] = field(default_factory=dict)
    """Variables of the ranks besides."""

    @classmethod
    def new(cls, lab: Lab, workload: str, world: int) -> Self:
        """Make the directory, owned by the lab's user; nothing is started yet."""
        directory = lab.shared / f"bench-{workload}-{secrets.token_hex(4)}"
        directory.mkdir()
        os.chown(directory, lab.uid, lab.uid)
        return cls(lab, workload, world, directory)

    def command(self, step_time: float) -> list[str]:
        """The rank's command line (to be run with ``python``)."""
        options = ["--dir", str(self.directory), "--step-time", str(step_time)]
        return ["-m", MODULE[self.workload], *options, *self.more]

    def env(self) -> dict[str, str]:
        """Return the variables that the ranks must have in their environment."""
        return {
            "BENCH_TOKEN": self.token,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "ROBUST_STATE_DIR": str(self.directory / "state"),
            **self.environ,
        }

    def submit(self, launch: str, sbatch: Iterable[str], step_time: float) -> None:
        """Submit a batch job whose script is ``launch`` in front of the rank's command."""
        lines = ["#!/bin/bash", *(f"export {k}={v}" for k, v in self.env().items())]
        lines += [f"{launch} python {' '.join(self.command(step_time))}", ""]
        output = ["-o", str(self.directory / "output"), "--open-mode=append"]
        self.job = self.lab.sbatch("\n".join(lines), [*output, "-D", str(self.directory), *sbatch])

    def scancel(self) -> None:
        """Ask Slurm to end the job."""
        self.lab.exec("head", ["scancel", str(self.job)])

    def cancel(self) -> None:
        """End the job and wait until Slurm has all its nodes back."""
        if self.job:
            self.scancel()
            self.lab.wait_job(self.job, {"CANCELLED", "COMPLETED", "FAILED", "NODE_FAIL"})

    # -- what it says

    def step(self, file: str = STEP) -> int:
        """The last step of rank 0, or of the process that notes it there; 0 before the first."""
        try:
            return int((self.directory / file).read_text())
        except (FileNotFoundError, ValueError):
            return 0

    def first_steps(self, since: float) -> dict[int, float]:
        """Wall time of the first step of each rank's newest incarnation since ``since``."""
        notes = read_lines(self.directory / FIRST_STEPS)
        return {int(n["rank"]): float(n["time"]) for n in notes if n["time"] > since}

    def incidents(self) -> list[Incident]:
        """Return the incidents that robust-srun has written so far."""
        path = self.directory / "state" / "jobs" / str(self.job) / "incidents.jsonl"
        return [
            Incident(
                float(r["time"]), str(r["action"]), str(r["outcome"]), dict(r["phases"]),
                str(r["rung"]), int(r["warm"]), int(r["kept"]),
            )
            for r in read_lines(path)
        ]  # fmt: skip

    def wait(self, ready: Callable[[], bool], what: str, timeout: float = START_UP) -> None:
        """Wait for a condition. BenchError with the end of the job's output."""
        deadline = time.monotonic() + timeout
        while not ready():
            if time.monotonic() > deadline:
                output = self.directory / "output"
                text = output.read_text(errors="replace")[-2000:] if output.exists() else ""
                raise BenchError(f"{self.directory}: {what}: not within {timeout:g} s\n{text}")
            time.sleep(POLL)

    def wait_stepping(self, steps: int = 10) -> None:
        """Wait until all ranks have started and ``steps`` more steps are done."""
        self.wait(lambda: len(self.first_steps(0.0)) >= self.world, "all ranks' first step")
        before = self.step()
        self.wait(lambda: self.step() >= before + steps, f"{steps} more steps")

    def warm(self) -> int:
        """Return the number of ranks that would start warm now, those on spare nodes included."""
        found = (self.directory / "state" / "jobs" / str(self.job)).glob("roster.*.json")
        nodes = [node for path in found for node in json.loads(path.read_text())["nodes"]]
        return sum(int(node["warm"]) for node in nodes if node["role"] in ("active", "spare"))

    def wait_warm(self, ranks: int) -> None:
        """Wait until so many would: as it is when faults are rare."""
        self.wait(lambda: self.warm() >= ranks, f"{ranks} warm ranks")

    # -- faults

    def signal_rank(self, rank: int, signum: signal.Signals) -> float:
        """Send a signal to the rank's own process; the wall time of just before."""
        pid = find_rank(scan(), self.token, rank)
        if pid is None:
            raise BenchError(f"{self.directory}: no process of rank {rank} is running")
        at = time.time()
        os.kill(pid, signum)
        return at


def find_rank(processes: Iterable[Process], token: str, rank: int) -> int | None:
    """The rank's own process in a training: of the newest epoch, the one nearest to the launcher.

    Processes of other trainings, labs and users lack the token in their environment.
    """
    ours = [
        p
        for p in processes
        if p.environ.get("BENCH_TOKEN") == token and p.environ.get("RANK") == str(rank)
    ]
    newest = max((int(p.environ.get("ROBUST_EPOCH", "0")) for p in ours), default=0)
    ours = [p for p in ours if int(p.environ.get("ROBUST_EPOCH", "0")) == newest]
    pids = {p.pid for p in ours}
    return next((p.pid for p in sorted(ours) if p.ppid not in pids), None)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a last line that is still being written is left out."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
