"""srun's words for a lease, and for the job that keeps the node of a lease with ranks (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from robust_slurm.slurm import Job
from srun_wrapper.command import steps

ROOM = 64  # MB of a node that a lease leaves to the job that keeps the node


class LeaseSize(NamedTuple):
    """The part of a node that a lease has: all its processors, and ``memory`` MB (0: not known)."""

    cpus: int
    memory: int


def lease_argv(
    launch: steps.Launch,
    job: Job,
    partition: str,
    tasks: int,
    exclude: Sequence[str],
    minutes: int,
    size: LeaseSize,
) -> list[str]:
    """Return srun's argv for a lease: as for a standby node, but another job may be beside it."""
    memory = [f"--mem={size.memory - ROOM}M"] if size.memory > ROOM else []
    words = {"--exclusive": [f"--mincpus={size.cpus}"], "--mem=0": memory}
    # From Slurm 24.11 on no node satisfies both --mincpus and --ntasks-per-node; with one node the
    # latter adds nothing.
    words[f"--ntasks-per-node={tasks}"] = []
    argv = steps.standby_argv(launch, job, partition, tasks, exclude, minutes)
    return [word for each in argv for word in words.get(each, [each])]


def hold_argv(job: Job, partition: str, node: str, minutes: int, size: LeaseSize) -> list[str]:
    """Return srun's argv for a job that does nothing on a node of a lease, and is not preempted.

    It has all processors of the node: else Slurm would end the lease for a job on the rest of them.
    """
    argv = ["srun", "--quiet", f"--partition={partition}", f"--nodelist={node}", "--nodes=1"]
    argv += ["--ntasks=1", f"--mincpus={size.cpus}", f"--time={minutes}", "--no-kill"]
    argv += ["--input=none", *([f"--mem={ROOM}M"] if size.memory > ROOM else [])]
    return [*argv, *steps.of_job(job), "sleep", "infinity"]
