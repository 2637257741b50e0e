"""Case ``plain_requeue`` of bench.recovery: what Slurm alone does about a lost node.

``sbatch --requeue`` with srun: slurmctld must give the node up (SlurmdTimeout), end the job and
start it again, which it does about 120 s later at the earliest. One run takes some three minutes
of waiting, so many small labs do it at the same time.
"""

from __future__ import annotations

import datetime
import itertools
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from bench.recovery.cases import NODES, PER_NODE, STEP_TIME
from bench.training.job import Training
from lab import Cluster, Lab

SLURM_CONF = {"SlurmdTimeout": 30, "KillWait": 30}  # defaults: 300 and 30
LABS = 10
RECOVERY = 600.0
PING_CYCLE = 10.0  # s, SlurmdTimeout / 3: faults are spread over it
LAUNCH = """\
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500
exec srun"""


def plain_requeue(runs: int, tell: Callable[[str], None]) -> list[dict[str, float]]:
    """Seconds by phase (``detect``, ``total``) of that many faults."""
    labs = min(runs, LABS)
    share = [len(range(i, runs, labs)) for i in range(labs)]
    with ThreadPoolExecutor(labs) as pool:
        work: list[Future[list[dict[str, float]]]] = [
            pool.submit(_in_own_lab, count, number, tell) for number, count in enumerate(share)
        ]
        return list(itertools.chain.from_iterable(w.result() for w in work))


def _in_own_lab(runs: int, number: int, tell: Callable[[str], None]) -> list[dict[str, float]]:
    time.sleep(2.0 * number)  # labs come up one after another
    found = []
    with Cluster(nodes=NODES + 1, standby=0, slurm_conf=SLURM_CONF) as lab:
        for run in range(runs):
            found.append(once(lab, f"n{2 + (number + run) % (NODES - 1)}"))
            tell(f"plain_requeue (lab {number}): {found[-1]['total']:.1f} s")
    return found


def once(lab: Lab, victim: str) -> dict[str, float]:
    """One lost node (not the batch host) under plain sbatch and srun."""
    training = Training.new(lab, "toy", NODES * PER_NODE)
    size = [f"-N{NODES}", f"--ntasks-per-node={PER_NODE}", "-w", f"n[1-{NODES}]"]
    # Not -w at the second start: the lost node would have to come back.
    training.submit(LAUNCH, ["--requeue", *size[:2]], STEP_TIME)
    training.wait_stepping()
    time.sleep(random.uniform(0.0, PING_CYCLE))
    at = lab.crash(victim)
    try:
        back = lambda: len(training.first_steps(at)) == training.world  # noqa: E731
        training.wait(back, f"not requeued after the loss of {victim}", RECOVERY)
        end = max(training.first_steps(at).values())
    finally:
        training.scancel()
        lab.heal(victim)
        training.cancel()
    given_up = down_at(lab.spec.log("slurmctld").read_text(errors="replace"), victim, at)
    return {"detect": given_up - at, "total": end - at}


def down_at(log: str, node: str, since: float) -> float:
    """Wall time at which slurmctld gave the node up. ValueError if its log does not say so."""
    for line in log.splitlines():
        found = re.match(r"\[([\dT:.-]+)\] error: Nodes (\S+) not responding, setting DOWN", line)
        if found and found[2] == node:
            at = datetime.datetime.fromisoformat(found[1]).timestamp()
            if at > since:
                return at
    raise ValueError(f"slurmctld's log does not say when it gave {node} up")
