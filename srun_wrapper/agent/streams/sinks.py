"""Sinks of a rank's output, seen from the shim.

Slurm numbers output by the real step's tasks, but after a swap a rank runs in another task's
slot. What depends on the task number (``--label``, ``%t`` in ``--output``) is therefore done by
the shim with the rank's number; everything else stays srun's.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from srun_wrapper.command.output_rules import Labeler, PatternContext, expand, label_width
from srun_wrapper.protocol.task_options import OutputPlan


@dataclass(frozen=True, slots=True)
class Sinks:
    """File descriptors for one rank's streams; ``direct``: stdout needs no copying at all."""

    out: int | None
    err: int | None
    label_out: Callable[[bytes], bytes] | None
    label_err: Callable[[bytes], bytes] | None
    direct: bool


_opened: dict[str, int] = {}
_opening = threading.Lock()  # a start that waits in open() must not truncate what a later one wrote


def open_sinks(plan: OutputPlan, rank: int, env: Mapping[str, str], *, truncate: bool) -> Sinks:
    """Open what this rank's streams need. Raises OSError as open() does.

    Files are truncated in the job's first epoch only (unless ``--open-mode=append``): a restart
    goes on in the same file.
    """
    out = _sink(1, plan.out, plan.only_out, plan, rank, env, truncate)
    # srun: equal names share one stream, and for a single task that is its stdout.
    shared = plan.err == plan.out if plan.err else plan.only_err == plan.only_out is not None
    err = out if shared else None
    if err is None:
        err = _sink(2, plan.err, plan.only_err, plan, rank, env, truncate)
    width = label_width(int(env["SLURM_NTASKS"]))
    labels = [
        Labeler(width, rank, unbuffered=plan.unbuffered) if plan.label else None for _ in range(2)
    ]
    direct = not plan.label and not plan.out and plan.only_out is None
    return Sinks(out, err, labels[0], labels[1], direct)


def are_open(plan: OutputPlan, rank: int, env: Mapping[str, str]) -> bool:
    """True if ``open_sinks`` would have no file to open, and so cannot wait for a file system."""
    patterns = filter(None, (plan.out, plan.err))
    return all(expand(pattern, _context(rank, env)) in _opened for pattern in patterns)


def _sink(
    fd: int,
    pattern: str,
    only: int | None,
    plan: OutputPlan,
    rank: int,
    env: Mapping[str, str],
    truncate: bool,
) -> int | None:
    if only is not None and only != rank:
        return None
    if not pattern:
        return fd
    path = expand(pattern, _context(rank, env))
    with _opening:
        if path not in _opened:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            if truncate and not plan.append:
                flags |= os.O_TRUNC
            _opened[path] = os.open(path, flags, 0o666)
        return _opened[path]


def _context(rank: int, env: Mapping[str, str]) -> PatternContext:
    return PatternContext(
        job_id=env.get("SLURM_JOB_ID", ""),
        step_id=env.get("SLURM_STEP_ID", ""),
        rank=rank,
        node=env.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0],
        node_index=int(env.get("SLURM_NODEID", "0")),
        user=env.get("SLURM_JOB_USER", ""),
        job_name=env.get("SLURM_JOB_NAME", ""),
        array_job_id=env.get("SLURM_ARRAY_JOB_ID", ""),
        array_task_id=env.get("SLURM_ARRAY_TASK_ID", ""),
        restart_count=env.get("SLURM_RESTART_COUNT", "0"),
    )
