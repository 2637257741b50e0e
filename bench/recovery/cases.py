"""Cases of bench.recovery that robust-srun recovers from, and torchrun's restart beside them.

Each case is an object whose ``once`` injects one fault and returns seconds by phase. They take
turns in one lab, so that a slow moment of the machine hits all of them alike.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from bench.common import BenchError
from bench.training.job import Incident, Training
from lab import Lab, LabError
from robust_slurm.auto.sources import IDLE
from srun_wrapper.agent.warm.interpreter import STAND_IN
from srun_wrapper.decide.incident import PHASES
from standby import leases

STEP_TIME = 0.1  # s of sleep in each step: the machine is idle until a fault comes
SETTLED = STAND_IN + IDLE + 1.0  # s; faults are hours apart: all is done that is done after a start
JITTER = 0.5  # s; faults must not be in step with the job's own intervals
RECOVERY = 180.0
NODES, PER_NODE = 4, 2  # 8 ranks on 4 nodes
ONE_HOST = 8  # ranks of the cases on one host
LONG_NODES = "n[1-4]"  # of the jobs that live through all runs
CRASH_NODES = ("n5", "n6", "n7", "n8", "n9")  # the last one is the spare
LAB_NODES = 9
PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "CANCEL"}
NO_LEASE = "--robust-lease-partition="
WENT_WRONG = (BenchError, LabError, OSError, subprocess.SubprocessError)
NVRX = os.environ.get("BENCH_NVRX", "")
"""Path of nvidia-resiliency-ext's ft_launcher, in an environment of its own; "": not compared."""
REJOINED: Mapping[str, str | int] = {
    "rung": "rejoin",
    "kept": ONE_HOST - 1,
}  # one rank is new, the others stay
# torch >= 2.5 shares one store with all incarnations, and a restarted gloo or NCCL then finds the
# addresses of the dead one (pytorch issue 135712): torchrun's restart works only with this.
TORCHRUN_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Case(Protocol):
    """One fault that can be injected again and again."""

    def once(self) -> dict[str, float]:
        """Inject the fault; seconds by phase (``total`` at least). BenchError if it went wrong."""

    def close(self) -> None:
        """End what is running for this case."""


def robust_job(
    lab: Lab,
    workload: str,
    nodes: int,
    per_node: int,
    where: str,
    spares: int = 0,
    options: str = "",
) -> Training:
    """Submit a training under robust-srun on the nodes named in ``where``."""
    training = Training.new(lab, workload, nodes * per_node)
    launch = f"exec robust-srun --robust-spares={spares} --robust-max-restarts=1000 {options}"
    size = [f"-N{nodes + spares}", f"--ntasks-per-node={per_node}", "-w", where]
    training.submit(launch, ["--no-kill", *size], STEP_TIME)
    return training


def recovered(
    training: Training,
    fault: Callable[[], float],
    action: str,
    warm: int = 0,
    must: Mapping[str, str | int] = {},
) -> dict[str, float]:
    """Inject ``fault`` (returns its wall time) into a stepping training and wait for recovery.

    The fault comes when so many ranks (``warm``) would start warm. ``must``: attributes of the
    incident that ended the recovery; with others it was not what is measured: BenchError.

    ``detect`` runs from the true time of the fault, not from the last sign of life that
    robust-srun knows of. ``total`` ends when robust-srun has seen the first step of all ranks.
    """
    training.wait_stepping()
    training.wait_warm(warm)
    time.sleep(SETTLED if warm else 0.0)
    known = len(training.incidents())
    time.sleep(random.uniform(0.0, JITTER))
    at = fault()
    found: list[Incident] = []

    def over() -> bool:
        nonlocal found
        found = training.incidents()[known:]
        return any(i.outcome == "recovered" for i in found)

    training.wait(over, f"no recovery from a fault at {at:.3f}", RECOVERY)
    if found[0].action != action:
        raise BenchError(f"{training.directory}: {found[0].action} where {action} was expected")
    phases = {name: sum(i.phases.get(name, 0.0) for i in found) for name in PHASES[1:]}
    last = found[-1]
    was = {name: getattr(last, name) for name in must}
    if was != must:
        raise BenchError(f"{training.directory}: {was} where {dict(must)} was expected")
    end = last.detected + sum(last.phases.get(name, 0.0) for name in PHASES[1:])
    return {"detect": found[0].detected - at, **phases, "total": end - at}


@contextmanager
def crash_of(lab: Lab, victim: str, training: Training) -> Iterator[Callable[[], float]]:
    """Yield what crashes the node. At the end the job is cancelled, and the node is well again."""
    crashed = False

    def crash() -> float:
        nonlocal crashed
        crashed = True
        return lab.crash(victim)

    try:
        yield crash
    finally:
        training.scancel()
        if crashed:
            lab.heal(victim)
        training.cancel()


class LongJob:
    """A training that lives through many faults, started when it is first needed."""

    def __init__(self, start: Callable[[], Training]) -> None:
        self._start = start
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        if self._training is None:
            self._training = self._start()
        return self._training

    def close(self) -> None:
        if self._training is not None:
            self._training.cancel()
            self._training = None


class RankFault:
    """A signal to one rank of a long job; the ranks take turns."""

    def __init__(
        self,
        job: LongJob,
        signum: signal.Signals,
        *,
        warm: bool = False,
        must: Mapping[str, str | int] = {},
    ) -> None:
        self._job = job
        self._warm = warm
        self._must = must
        self._signum = signum
        self._ranks = itertools.count(1)

    def once(self) -> dict[str, float]:
        training = self._job.training
        rank = next(self._ranks) % training.world
        warm = training.world if self._warm else 0
        kill = lambda: training.signal_rank(rank, self._signum)  # noqa: E731
        return recovered(training, kill, "restart", warm, self._must)

    def close(self) -> None:
        self._job.close()


class NodeCrash:
    """A crash of a node that is not the batch host; a new job each time, on the same nodes."""

    def __init__(
        self, lab: Lab, workload: str, per_node: int, spares: int, warm: bool, lease: bool = False
    ) -> None:
        """``lease``: the job has leased the standby node before."""
        self._lab = lab
        self._warm = warm
        self._lease = lease
        self._workload = workload
        self._per_node = per_node
        self._spares = spares
        self._victims = itertools.cycle(CRASH_NODES[1:NODES])

    def once(self) -> dict[str, float]:
        victim = next(self._victims)
        where = ",".join(CRASH_NODES[: NODES + self._spares])
        options = "" if self._lease else NO_LEASE
        training = robust_job(
            self._lab, self._workload, NODES, self._per_node, where, self._spares, options
        )
        action = "swap_spare" if self._spares else "swap_standby"
        ranks = (NODES + self._spares + self._lease) * self._per_node if self._warm else 0
        ahead = self._warm and (self._spares or self._lease)  # on the node that comes, too
        must = {"warm": training.world} if ahead else {}
        with crash_of(self._lab, victim, training) as crash:
            return recovered(training, crash, action, ranks, must)

    def close(self) -> None:
        """Do nothing: nothing runs between two faults."""


class Preempting:
    """A crash of a node whose replacement another job has leased."""

    def __init__(self, lab: Lab) -> None:
        self._other = LongJob(lambda: robust_job(lab, "toy", 1, 1, "n1"))
        self._crash = NodeCrash(lab, "toy", PER_NODE, 0, warm=True)

    def once(self) -> dict[str, float]:
        self._other.training.wait_stepping()
        self._other.training.wait_warm(2)  # its own rank, and the leased node's
        return self._crash.once()

    def close(self) -> None:
        self._other.close()


def lease_tier(lab: Lab) -> None:
    """Make the partitions of leases, as ``robust-standby apply --lease lease`` does."""
    nodes = lab.spec.standby_names
    words = ["update PartitionName=standby PriorityTier=100 PreemptMode=OFF"]
    for name, settings in leases.settings("lease").items():
        given = " ".join(f"{key}={value}" for key, value in settings.items())
        words.append(f"create PartitionName={name} Nodes={','.join(nodes)} State=UP {given}")
    for each in words:
        lab.exec("head", ["scontrol", *each.split()], user=False, check=True)


def torchrun() -> list[str]:
    """On one host; restarts by itself."""
    return ["torchrun", "--standalone", f"--nproc-per-node={ONE_HOST}", "--max-restarts=1000"]


def ft_launcher() -> list[str]:
    """NVRx's, as quick as it can be set. Its ranks send it no heartbeats: it sees them die."""
    return [
        *(NVRX, f"--nproc-per-node={ONE_HOST}", "--max-restarts=1000", "--monitor-interval=0.1"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29571"),
        "--ft-workload-check-interval=1",
    ]


class LauncherKill:
    """A launcher with a restart of its own: SIGKILL of a rank → all past their first step."""

    def __init__(self, lab: Lab, workload: str, argv: Sequence[str]) -> None:
        self._lab = lab
        self._argv = argv
        self._workload = workload
        self._ranks = itertools.count(1)
        self._training: Training | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def once(self) -> dict[str, float]:
        training = self._training or self._begin()
        training.wait_stepping()
        time.sleep(random.uniform(0.0, JITTER))
        at = training.signal_rank(next(self._ranks) % training.world, signal.SIGKILL)
        back = lambda: len(training.first_steps(at)) == training.world  # noqa: E731
        training.wait(back, f"{self._argv[0]} did not restart after a kill at {at:.3f}", RECOVERY)
        return {"total": max(training.first_steps(at).values()) - at}

    def _begin(self) -> Training:
        self._training = training = Training.new(self._lab, self._workload, ONE_HOST)
        with (training.directory / "output").open("ab") as output:
            self._process = self._lab.popen(
                "n1",
                [*self._argv, *training.command(STEP_TIME)],
                env={**training.env(), **TORCHRUN_ENV},
                cwd=training.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return training

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(40.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10.0)
            self._process = self._training = None


class NvrxInProcess:
    """NVRx's in-process wrapper: a signal to one rank → all past their first step.

    The wrapper starts no process: a rank in reserve takes part, and each fault has new ones.
    """

    def __init__(self, lab: Lab, signum: signal.Signals) -> None:
        self._lab = lab
        self._signum = signum
        self._ranks = itertools.cycle(range(1, ONE_HOST))  # rank 0 has the store

    def once(self) -> dict[str, float]:
        training = Training.new(self._lab, "nvrx", ONE_HOST)
        argv = [str(Path(NVRX).with_name("python")), *training.command(STEP_TIME)]
        world = {"WORLD_SIZE": str(ONE_HOST + 1), "MASTER_ADDR": "127.0.0.1"}
        world |= training.env() | {"MASTER_PORT": str(random.randrange(20000, 28000))}
        processes: list[subprocess.Popen[bytes]] = []
        try:
            with (training.directory / "output").open("ab") as output:
                for rank in range(ONE_HOST + 1):
                    process = self._lab.popen(
                        "n1",
                        argv,
                        env=world | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                        cwd=training.directory,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                    )
                    processes.append(process)
            training.wait_stepping()
            time.sleep(random.uniform(0.0, JITTER))
            at = training.signal_rank(next(self._ranks), self._signum)
            back = lambda: len(training.first_steps(at)) == training.world  # noqa: E731
            training.wait(back, f"no restart after a fault at {at:.3f}", RECOVERY)
            return {"total": max(training.first_steps(at).values()) - at}
        finally:
            for process in processes:
                process.kill()
                process.wait(10.0)

    def close(self) -> None:
        """Do nothing: nothing runs between two faults."""
