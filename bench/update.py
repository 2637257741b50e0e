"""The time from a request for new code to its first step: ``python -m bench.update`` (root).

``update``: robust-update on a job of robust-srun; ``requeue``: ``scontrol requeue`` of the same
training under plain srun, which is how a user without it runs new code. Both are 8 ranks on one
node of a lab. See docs/bench.md for how to read the numbers.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bench.common import MIN_SAMPLES, Results, main
from bench.recovery_cases import SETTLED
from bench.training import BenchError, Training
from lab import Cluster, Lab

RANKS = 8
STEP_TIME = 0.1
QUICK = 2
ABREAST = 7  # jobs that are requeued in one lab, a few seconds apart: Slurm lets each wait 2 min
APART = 5.0  # s
REQUEUE = 400.0  # s; Slurm waits about 120 s before it starts a requeued job
SCRIPT = """import os, pathlib
VERSION = {version}
pathlib.Path({dir!r}, "ran." + os.environ.get("SLURM_PROCID", "")).write_text(str(VERSION))
from bench.{module} import main
main()
"""
MASTER = """\
export MASTER_ADDR=$(hostname) MASTER_PORT=29500
"""


@dataclass
class Job:
    """A training that runs ``train.py`` of a directory of its own, and the code's version there."""

    training: Training
    version: int = 0

    @classmethod
    def new(cls, lab: Lab, workload: str) -> Job:
        job = cls(Training.new(lab, workload, RANKS))
        (job.training.directory / "proj").mkdir()
        job.edit()
        return job

    def edit(self) -> None:
        """Write the next version of the code."""
        self.version += 1
        training = self.training
        values = {"version": self.version, "dir": str(training.directory)}
        text = SCRIPT.format(**values, module=f"{training.workload}_train")
        (training.directory / "proj" / "train.py").write_text(text)

    def start(self, launch: str, sbatch: list[str]) -> None:
        training = self.training
        lines = ["#!/bin/bash", *(f"export {k}={v}" for k, v in training.env().items())]
        options = f"--dir {training.directory} --step-time {STEP_TIME}"
        lines += [f"cd {training.directory}/proj", f"{launch} python train.py {options}", ""]
        args = ["-o", str(training.directory / "output"), "--open-mode=append"]
        size = ["-N1", f"--ntasks-per-node={RANKS}", "--overcommit"]
        training.job = training.lab.sbatch("\n".join(lines), [*args, *size, *sbatch])
        training.wait_stepping()

    def all_stepped(self, since: float, timeout: float) -> float:
        """Wait until all ranks have made a step with the new code; the wall time of the last."""
        training = self.training
        done = lambda: len(training.first_steps(since)) == RANKS  # noqa: E731
        training.wait(done, f"no step of version {self.version}", timeout)
        ran = {(training.directory / f"ran.{rank}").read_text() for rank in range(RANKS)}
        if ran != {str(self.version)}:
            raise BenchError(f"{training.directory}: versions {ran} ran, not {self.version}")
        return max(training.first_steps(since).values())


def update(results: Results, name: str, workload: str) -> None:
    """Update one long job again and again; ranks are warm, as between updates hours apart."""
    runs = results.runs or (QUICK if results.quick else MIN_SAMPLES)
    found: list[float] = []
    said: list[float] = []
    with Cluster(nodes=1, standby=0) as lab:
        job = Job.new(lab, workload)
        job.start("exec robust-srun --robust-code=.", ["--no-kill"])
        for run in range(runs):
            job.training.wait_warm(RANKS)
            time.sleep(SETTLED)
            job.edit()
            at = time.time()
            argv = ["robust-update", str(job.training.job), "--now", "--why=bench"]
            env = {"ROBUST_STATE_DIR": str(job.training.directory / "state")}
            done = lab.exec("head", argv, env=env, timeout=120)
            said.append(time.time() - at)
            if done.returncode:
                raise BenchError(f"{job.training.directory}: {done.stderr}")
            found.append(job.all_stepped(at, 60.0) - at)
            print(f"{name} {run + 1}/{runs}: {found[-1]:.2f} s", flush=True)
        job.training.cancel()
    results.add(f"{name}.total_s", found, "s")
    results.add(f"{name}.command_s", said, "s")


def requeue(results: Results) -> None:
    """Requeue the same training under plain srun, several jobs in turn."""
    runs = results.runs or (QUICK if results.quick else MIN_SAMPLES)
    jobs = min(runs, ABREAST)
    with Cluster(nodes=jobs, standby=0) as lab, ThreadPoolExecutor(jobs) as pool:
        shares = [len(range(number, runs, jobs)) for number in range(jobs)]
        work = [pool.submit(_requeued, lab, count, n) for n, count in enumerate(shares)]
        found = list(itertools.chain.from_iterable(each.result() for each in work))
    results.add("requeue.total_s", found, "s")


def _requeued(lab: Lab, runs: int, number: int) -> list[float]:
    time.sleep(APART * number)
    found = []
    job = Job.new(lab, "toy")
    job.start(MASTER + "exec srun --overcommit", ["--requeue"])
    for _ in range(runs):
        job.edit()
        at = time.time()
        lab.exec("head", ["scontrol", "requeue", str(job.training.job)], check=True)
        found.append(job.all_stepped(at, REQUEUE) - at)
        print(f"requeue (job {number}): {found[-1]:.1f} s", flush=True)
    job.training.cancel()
    return found


def toy(results: Results) -> None:
    update(results, "update", "toy")
    _ratio(results)


def torch(results: Results) -> None:
    update(results, "update_torch", "torch")


def plain(results: Results) -> None:
    requeue(results)
    _ratio(results)


def _ratio(results: Results) -> None:
    if {"update.total_s", "requeue.total_s"} <= results.metrics.keys():
        results.ratio("requeue / update", "requeue.total_s", "update.total_s")


if __name__ == "__main__":
    raise SystemExit(main("update", {"update": toy, "update_torch": torch, "requeue": plain}))
