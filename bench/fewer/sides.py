"""The sides that train on such a site: each returns what it counts, its steps among it."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench.fewer.replicas import STEP_TIME, TORCHFT, Replicas, committed
from bench.fewer.site import RUNNING, Schedule, Site
from bench.recovery.plain import LAUNCH, SLURM_CONF
from bench.training.job import Training
from lab import Cluster

SAVE = 50  # steps between two on disk
OURS = "exec robust-srun --robust-max-restarts=1000"
FEWER = f"{OURS} --robust-min-nodes={RUNNING - 2} --robust-standby-wait=1"
PLAIN = (
    LAUNCH
    + """ bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=0 exec "$@"' rank"""
)


@dataclass(slots=True)
class Durable(Training):
    """A training that is on disk now and then as well."""

    def command(self, step_time: float) -> list[str]:
        """Return that of any training, and how to save."""
        return [*Training.command(self, step_time), "--durable", "--save", str(SAVE)]


@dataclass(frozen=True, slots=True)
class Side:
    """``standby``: whether machines that come are standby nodes, else of the job's partition."""

    launch: str
    standby: bool = False
    faults: bool = True


SIDES = {
    "undisturbed": Side(OURS, faults=False),
    "fewer": Side(FEWER, standby=True),
    "requeue": Side(OURS),
    "plain_requeue": Side(PLAIN),
}


def slurm_side(side: Side, schedule: Schedule, output: Path) -> dict[str, int]:
    """Train under Slurm; return the steps that it made in the time."""
    more = len(schedule.losses())
    nodes, standby = (RUNNING, more) if side.standby else (RUNNING + more, 0)
    with Cluster(nodes=nodes, standby=standby, slurm_conf=SLURM_CONF) as lab:
        fresh = [f"s{n + 1}" if side.standby else f"n{RUNNING + 1 + n}" for n in range(more)]
        site = Site(lab, fresh)
        site.drain_fresh()
        training = Durable.new(lab, "saved", RUNNING)
        sbatch = ["--requeue", "--no-kill", f"-N{RUNNING}", "--ntasks-per-node=1"]
        training.submit(side.launch, sbatch, STEP_TIME)
        try:
            training.wait_stepping()
            before = training.step()
            if side.faults:
                site.run(schedule, threading.Event())
            else:
                time.sleep(schedule.seconds)
            return {"steps": training.step() - before}
        finally:
            training.scancel()
            keep(training, output)


def torchft_side(schedule: Schedule, output: Path) -> dict[str, int]:
    """Train as torchft has it: a process a node, started again where a machine is repaired."""
    more = len(schedule.losses())
    own = [Path(TORCHFT).parents[1]]
    with Cluster(nodes=RUNNING + more, standby=0, slurm_conf=SLURM_CONF, visible=own) as lab:
        training = Training.new(lab, "torchft", RUNNING)
        site = Site(lab, [f"n{RUNNING + 1 + n}" for n in range(more)])
        with Replicas(lab, training, output, lambda: site.lost).running() as replicas:
            site.repaired = replicas.start
            site.drain_fresh()
            for node in site.running:
                replicas.start(node)

            def step() -> int:
                return committed(replicas.steps(site.running))

            training.wait(lambda: step() > 20, "torchft's first steps")
            before, started = step(), replicas.restarts
            site.run(schedule, threading.Event())
            return {"steps": step() - before, "restarts": replicas.restarts - started}


def keep(training: Training, output: Path) -> None:
    """Copy what a job has written: its output, our log and our incidents."""
    records = training.directory / "state" / "jobs" / str(training.job)
    for path in (training.directory / "output", *records.glob("*.log"), *records.glob("*.jsonl")):
        if path.exists():
            shutil.copy(path, output)
