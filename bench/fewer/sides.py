"""The sides that train on such a site: each returns the steps that it has made in the time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.common import BenchError
from bench.fewer.site import RUNNING, Schedule, Site
from bench.recovery.plain import LAUNCH, SLURM_CONF
from bench.training.job import Training
from bench.training.rank import step_file
from lab import Cluster, Lab
from lab.keeper.ranks import scan

STEP_TIME = 0.1
SAVE = 50  # steps between two on disk
TORCHFT = os.environ.get("BENCH_TORCHFT", "")
"""Path of torchft's torchft_lighthouse, in an environment of its own; "": not compared."""
OURS = "exec robust-srun --robust-max-restarts=1000"
FEWER = f"{OURS} --robust-min-nodes={RUNNING - 2} --robust-standby-wait=1"
LIGHTHOUSE = 29510
MAJORITY = RUNNING // 2 + 1  # replicas; with fewer, two parts could each go on without the other
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


def slurm_side(side: Side, schedule: Schedule) -> int:
    """Train under Slurm; return the step that it is at when the time is over."""
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
            return training.step() - before
        finally:
            training.scancel()


def torchft_side(schedule: Schedule) -> int:
    """Train as torchft has it: a process a node, started again where a machine is repaired."""
    more = len(schedule.losses())
    own = [Path(TORCHFT).parents[1]]
    with Cluster(nodes=RUNNING + more, standby=0, slurm_conf=SLURM_CONF, visible=own) as lab:
        training = Training.new(lab, "torchft", RUNNING)
        with _Replicas(lab, training).running() as replicas:
            site = Site(lab, [f"n{RUNNING + 1 + n}" for n in range(more)], replicas.start)
            site.drain_fresh()
            for node in site.running:
                replicas.start(node)

            def step() -> int:
                return committed(replicas.steps(site.running))

            training.wait(lambda: step() > 20, "torchft's first steps")
            before = step()
            site.run(schedule, threading.Event())
            return step() - before


def committed(steps: Sequence[int]) -> int:
    """Return the newest step that a majority has committed, from the newest one of each."""
    return sorted(steps, reverse=True)[len(steps) // 2]


class _Replicas:
    def __init__(self, lab: Lab, training: Training) -> None:
        self._lab = lab
        self._training = training
        self._numbers: dict[str, int] = {}

    @contextlib.contextmanager
    def running(self) -> Iterator[_Replicas]:
        """Have a lighthouse; at the end, end all."""
        if not TORCHFT:
            raise BenchError("torchft: BENCH_TORCHFT must be the path of a torchft_lighthouse")
        argv = [TORCHFT, "--bind", f"[::]:{LIGHTHOUSE}", "--min_replicas", str(MAJORITY)]
        argv += ["--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"]
        lighthouse = self._start("head", argv, {})
        try:
            yield self
        finally:
            for process in scan():
                if process.environ.get("BENCH_TOKEN") == self._training.token:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, 9)
            lighthouse.kill()
            lighthouse.wait()

    def start(self, node: str) -> None:
        """Start the replica of a node."""
        self._numbers[node] = number = len(self._numbers)
        env = self._training.env() | {
            "TORCHFT_LIGHTHOUSE": f"http://head:{LIGHTHOUSE}",
            "REPLICA_GROUP_ID": str(number),
            "MIN_REPLICA_GROUPS": str(MAJORITY),
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_PORT": "29501",
        }
        python = str(Path(TORCHFT).with_name("python"))
        self._start(node, [python, *self._training.command(STEP_TIME)], env)

    def steps(self, nodes: Sequence[str]) -> list[int]:
        """Return the newest step of each of these nodes' replicas."""
        return [self._training.step(step_file(self._numbers[node])) for node in nodes]

    def _start(self, node: str, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self._training.directory / "output").open("ab") as output:
            return self._lab.popen(
                node,
                argv,
                env=env,
                cwd=self._training.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
