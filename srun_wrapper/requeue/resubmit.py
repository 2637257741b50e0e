"""Submit a job a second time: the same script, size and options, without its bad nodes.

This is done where Slurm cannot requeue the job itself soon: its batch host is lost, or a lost node
cannot be released from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from robust_slurm.slurm import Job, Slurm

# Of robust-srun's environment: the size that the allocation had before any node left it, with
# sbatch's option for each; the last one is the SPANK plugin's.
SIZE = {
    "SLURM_JOB_NUM_NODES": "nodes",
    "SLURM_NTASKS": "ntasks",
    "SLURM_NTASKS_PER_NODE": "ntasks-per-node",
    "SLURM_GPUS": "gpus",
    "SLURM_GPUS_PER_TASK": "gpus-per-task",
    "ROBUST_BY_PLUGIN": "robust",
}
SCRIPT_WORDS = "script"  # key, beside these, of the script's arguments as JSON


class Limits(NamedTuple):
    """Limits for the restart of the job: nodes to exclude, seconds to wait."""

    exclude: tuple[str, ...]
    delay: int = 0


def submit_copy(
    slurm: Slurm, job: Job, limits: Limits, partition: str, size: Mapping[str, str]
) -> int:
    """Submit the copy; return its job id. ``size``: the variables ``SIZE``. Raises SlurmError.

    A copy that exists already is returned instead: slurmctld may have accepted an earlier request
    although the answer was lost.
    """
    for other in slurm.jobs(job.user, after=job.id, name=job.name):
        if other.comment == _comment(job) and not other.finished:
            return other.id
    script = slurm.batch_script(job.id)
    args = copy_args(job, limits, partition, size)
    if words := json.loads(size.get(SCRIPT_WORDS, "[]")):
        args += ["/dev/stdin", *words]
    return slurm.submit(script, args=args, cwd=Path(job.work_dir) if job.work_dir else None)


def copy_args(job: Job, limits: Limits, partition: str, size: Mapping[str, str]) -> list[str]:
    """sbatch options that make the copy what the job was, whatever its command line said.

    ``size``: the variables ``SIZE``; without a number of nodes in it, as many as the job has.
    """
    size = {"SLURM_JOB_NUM_NODES": str(job.num_nodes), **size}
    raw = job.raw
    args = [
        f"--job-name={job.name}",
        f"--partition={partition}",
        f"--comment={_comment(job)}",
        "--no-kill",
        "--open-mode=append",
    ]
    args += [f"--exclude={','.join(limits.exclude)}"] if limits.exclude else []
    args += [f"--begin=now+{limits.delay}"] if limits.delay else []
    args += _optional(
        ("account", job.account),
        ("qos", job.qos),
        ("reservation", job.reservation),
        ("gres", job.tres_per_node),
        ("constraint", job.features),
        ("output", raw.get("StdOut")),
        ("error", raw.get("StdErr")),
        ("time", raw.get("TimeLimit") if job.time_limit_s else None),
        *((option, size.get(name)) for name, option in SIZE.items()),
        ("cpus-per-task", str(job.cpus_per_task) if job.cpus_per_task > 1 else None),
        ("mem", f"{job.min_memory_node_mb}M" if job.min_memory_node_mb else None),
        ("mem-per-cpu", f"{job.min_memory_cpu_mb}M" if job.min_memory_cpu_mb else None),
    )
    if job.oversubscribe == "NO":
        args.append("--exclusive")
    return args


def _comment(job: Job) -> str:
    return f"robust: goes on for job {job.id}"


def _optional(*pairs: tuple[str, str | None]) -> Sequence[str]:
    return [f"--{name}={value}" for name, value in pairs if value and value != "(null)"]
