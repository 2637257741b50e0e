"""The virtual world as the ranks see it: their environment.

In three parts, so that a start of 10,000 ranks costs little: ``world_env`` once, ``node_env``
per node, ``rank_env`` per rank; a rank's environment is their union over its inherited one,
from which STALE must be removed first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import groupby

from robust_slurm.resizing.world import REPLICA, RESIZED

STALE = (
    *("SLURM_NTASKS_PER_NODE", "ROBUST_RESUME_STEP", RESIZED, REPLICA),
    *("ROBUST_CODE_TREE", "ROBUST_CODE_VERSIONS", "ROBUST_CODE_SOURCE", "ROBUST_CODE_VERSION"),
)
"""Variables that are set only in some worlds: one inherited from the real step, or from the rank
that has submitted the job, would be wrong."""
NOT_OF_SLURM = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that make one world of the tasks in torch's eyes; srun sets none of them."""


def world_env(
    *,
    names: Sequence[str],
    ranks: Sequence[Sequence[int]],
    epoch: int,
    master_addr: str,
    master_port: int,
    restart_reason: str = "",
    resume_step: int | None = None,
    resized: tuple[int, int] | None = None,
    replica_ranks: int = 1,
    job_id: str | int,
    step_id: str | int,
) -> dict[str, str]:
    """Variables that are equal for all ranks.

    ``names`` and ``ranks``: the nodes in virtual order and each one's rank numbers by local rank.
    ``restart_reason`` is empty in the first epoch; ``resume_step`` None: not known, not set;
    ``resized``: numbers of the training's ranks at the job's begin and now, if these differ, of
    which ``replica_ranks`` each compute a share together.
    """
    counts = [len(own) for own in ranks]
    size = str(sum(counts))
    n_nodes = str(len(names))
    hosts = fold_hosts(names)
    per_node = format_tasks_per_node(counts)
    env = {
        "SLURM_NTASKS": size,
        "SLURM_NPROCS": size,
        "SLURM_STEP_NUM_TASKS": size,
        "WORLD_SIZE": size,
        "SLURM_NNODES": n_nodes,
        "SLURM_JOB_NUM_NODES": n_nodes,
        "SLURM_STEP_NUM_NODES": n_nodes,
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_NODELIST": hosts,
        "SLURM_JOB_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_JOB_ID": str(job_id),  # of the first job: a standby node's would split the world
        "SLURM_JOBID": str(job_id),
        "SLURM_STEP_ID": str(step_id),
        "SLURM_STEPID": str(step_id),
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": str(master_port),
        "ROBUST_EPOCH": str(epoch),
        "ROBUST_RESTART_REASON": restart_reason,
        "ROBUST_JOB_ID": str(job_id),
    }
    if len(set(counts)) == 1:
        env["SLURM_NTASKS_PER_NODE"] = str(counts[0])
    if resized is not None:
        env[RESIZED] = f"{resized[0]}:{resized[1]}"
        if replica_ranks > 1:
            env[REPLICA] = str(replica_ranks)
    if resume_step is not None:
        env["ROBUST_RESUME_STEP"] = str(resume_step)
    return env


def node_env(*, index: int, name: str, ranks: Sequence[int]) -> dict[str, str]:
    """Variables equal for all ranks of the node in place ``index``; ``ranks`` by local rank."""
    return {
        "SLURM_NODEID": str(index),
        "NODE_RANK": str(index),
        "SLURMD_NODENAME": name,
        "SLURM_GTIDS": ",".join(map(str, ranks)),
        "LOCAL_WORLD_SIZE": str(len(ranks)),
    }


def rank_env(*, rank: int, local: int) -> dict[str, str]:
    """Variables that differ between the ranks of a node."""
    return {
        "SLURM_PROCID": str(rank),
        "RANK": str(rank),
        "SLURM_LOCALID": str(local),
        "LOCAL_RANK": str(local),
    }


def only_slurm(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of an independent task: nothing in it that names a world of ranks."""
    return {name: value for name, value in env.items() if name not in NOT_OF_SLURM}


def only_ours(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are ours, none of which srun sets."""
    return {name: value for name, value in env.items() if name.startswith("ROBUST_")}


def format_tasks_per_node(counts: Sequence[int]) -> str:
    """``[2, 2, 2, 1]`` -> ``"2(x3),1"``, as Slurm writes it."""
    runs = ((count, len(list(group))) for count, group in groupby(counts))
    return ",".join(f"{count}(x{n})" if n > 1 else str(count) for count, n in runs)


def parse_tasks_per_node(text: str) -> list[int]:
    """``"2(x3),1"`` -> ``[2, 2, 2, 1]``. Raises ValueError for anything else."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part, re.ASCII)
        if found is None:
            raise ValueError(f"not a tasks-per-node list: {text!r}")
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


_NUMBERED = re.compile(r"(.*?)(\d{1,9})", re.DOTALL | re.ASCII)


def fold_hosts(names: Sequence[str]) -> str:
    """Slurm host list that ``scontrol show hostnames`` expands to exactly this order.

    ``["n1", "n2", "n7", "n3"]`` -> ``"n[1-2,7,3]"``. (ClusterShell's NodeSet sorts, and after a
    swap the virtual order is not the sorted one.)
    """
    parts: list[str] = []
    numbered = [_split(name) for name in names]
    for prefix, group in groupby(numbered, key=lambda item: item[0] if item[1] else None):
        items = list(group)
        if prefix is None:
            parts += [name for name, _ in items]
        elif len(items) == 1:
            parts.append(prefix + items[0][1])
        else:
            parts.append(f"{prefix}[{_ranges([digits for _, digits in items])}]")
    return ",".join(parts)


def _split(name: str) -> tuple[str, str]:
    """("n", "12") for "n12"; (name, "") if it cannot be folded."""
    found = _NUMBERED.fullmatch(name)
    return (found[1], found[2]) if found else (name, "")


def _ranges(numbers: Sequence[str]) -> str:
    runs: list[list[str]] = []
    for digits in numbers:
        if runs and _follows(runs[-1][-1], digits):
            runs[-1].append(digits)
        else:
            runs.append([digits])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _follows(before: str, after: str) -> bool:
    """True if ``before-after`` is a range of these two: the next number, written as wide."""
    return int(after) == int(before) + 1 and after == str(int(after)).zfill(len(before))
