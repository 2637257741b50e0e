"""Find the process of a rank among the processes of a lab by their environments."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from robust_slurm import process_stat


class Process(NamedTuple):
    """A process as /proc shows it: its pid, its parent's, its environment at exec."""

    pid: int
    ppid: int
    environ: Mapping[str, str]


def pick_rank(processes: Iterable[Process], job: str, rank: str) -> list[int]:
    """The pids of rank `rank` of job `job`: its first process and all below it, parents first.

    A rank launched by robust-srun is known by ROBUST_EPOCH (the newest epoch counts) and RANK;
    any other by RANK, or, if no process of the job's steps has that RANK, by SLURM_PROCID. Only
    a task of a step counts: the batch script has SLURM_PROCID=0 too. Empty: no such rank.
    """
    processes = list(processes)
    of_job = [
        p
        for p in processes
        if job in (p.environ.get("ROBUST_JOB_ID"), p.environ.get("SLURM_JOB_ID"))
    ]
    robust = [p for p in of_job if "ROBUST_EPOCH" in p.environ and p.environ.get("RANK") == rank]
    if robust:
        newest = max(_number(p.environ["ROBUST_EPOCH"]) for p in robust)
        chosen = [p for p in robust if _number(p.environ["ROBUST_EPOCH"]) == newest]
    else:
        tasks = [p for p in of_job if "SLURM_STEP_ID" in p.environ or "RANK" in p.environ]
        chosen = [p for p in tasks if p.environ.get("RANK") == rank] or [
            p for p in tasks if "RANK" not in p.environ and p.environ.get("SLURM_PROCID") == rank
        ]
    return _with_descendants(processes, {p.pid for p in chosen})


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _with_descendants(processes: list[Process], pids: set[int]) -> list[int]:
    parent = {p.pid: p.ppid for p in processes}
    depth: dict[int, int] = {}
    for pid in parent:
        chain = [pid]
        while chain[-1] not in pids and parent.get(chain[-1], 0) > 0:
            chain.append(parent[chain[-1]])
        if chain[-1] in pids:
            depth[pid] = len(chain)
    return sorted(depth, key=lambda pid: (depth[pid], pid))


def parse_environ(raw: bytes) -> dict[str, str]:
    """The text of /proc/PID/environ as a dict; what is no `NAME=value` is skipped."""
    pairs = (item.partition(b"=") for item in raw.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, eq, value in pairs if eq and name}


def scan(proc: Path = Path("/proc")) -> list[Process]:
    """All processes that the caller's /proc shows; one that ends meanwhile is left out."""
    found: list[Process] = []
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environ = parse_environ((entry / "environ").read_bytes())
            ppid = process_stat.read(entry.name, str(proc)).parent
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        found.append(Process(int(entry.name), ppid, environ))
    return found
