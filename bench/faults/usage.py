"""The processes, memory, descriptors and allocations of a training in a soak."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from bench.chaos.job import ChaosError, Job
from bench.common import Metric, Results

ENDS = 5  # samples at the beginning and at the end whose medians are compared
RSS_MORE = 40.0  # MB that a process of ours may have gained at the end
FDS_MORE = 24  # each standby node in the job costs robust-srun a few
PROCESSES_MORE = 16  # two of srun for each standby node, and what is between two states


@dataclass(frozen=True, slots=True)
class Usage:
    """One sample while all ranks train. `task`: robust-task of the batch host, the oldest."""

    srun_rss_mb: float
    srun_fds: float
    srun_threads: float
    task_rss_mb: float
    task_fds: float
    task_threads: float
    processes: float
    """Processes of the job on all nodes."""
    shm_files: float
    """Files of ours in the memory of the batch host."""


def sample(job: Job) -> Usage | None:
    """Take a sample; None if a process ended meanwhile."""
    try:
        srun, task = _process(job.supervisor()), _process(job.shims("n1")[0])
        files = job.lab.exec("n1", ["find", "/dev/shm", "-path", "*/robust-*"]).stdout.split()
        count = len(job.pids(""))
    except (ChaosError, OSError, IndexError, LookupError):
        return None
    return Usage(*srun, *task, count, len(files))


def _process(pid: int) -> tuple[float, float, float]:
    """Return memory in MB, descriptors and threads of a process."""
    root = Path(f"/proc/{pid}")
    words = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    rss = int(words["VmRSS"].split()[0]) / 1024
    return round(rss, 1), float(len(list((root / "fd").iterdir()))), float(words["Threads"])


def grown(samples: Sequence[Usage]) -> list[str]:
    """Say what grew from the first samples to the last ones by more than it may."""
    if len(samples) < 2 * ENDS:
        return []
    first, last = ends(samples)
    may = {"rss_mb": RSS_MORE, "fds": FDS_MORE, "processes": PROCESSES_MORE, "shm_files": 24.0}
    found = []
    for name, before in first.items():
        most = next((more for part, more in may.items() if name.endswith(part)), FDS_MORE)
        if last[name] > before + most:
            found.append(f"{name}: {before:g} at the start, {last[name]:g} at the end")
    return found


def ends(samples: Sequence[Usage]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the medians of the first samples and of the last ones, by name."""
    names = [field.name for field in fields(Usage)]
    first, last = (
        {name: statistics.median(float(getattr(one, name)) for one in some) for name in names}
        for some in (samples[:ENDS], samples[-ENDS:])
    )
    return first, last


def record(results: Results, samples: Sequence[Usage]) -> None:
    """Add start, end and maximum of everything that is watched."""
    if not samples:
        return
    first, last = ends(samples)
    for name in first:
        unit = "MB" if name.endswith("_mb") else "count"
        most = max(float(getattr(one, name)) for one in samples)
        values = {"start": first[name], "end": last[name], "most": most}
        for when, value in values.items():
            results.metrics[f"soak.{name}_{when}"] = Metric(value, value, len(samples), unit)
