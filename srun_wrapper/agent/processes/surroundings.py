"""Surroundings that a child process inherits: namespaces, limits, processors and the like."""

from __future__ import annotations

import os
from pathlib import Path

from robust_slurm import process_stat

_STATUS = (
    *("Umask", "Uid", "Gid", "Groups", "SigIgn", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"),
    *("NoNewPrivs", "Seccomp", "Seccomp_filters", "Cpus_allowed", "Mems_allowed"),
)


def same_surroundings(pid: int, thread: int, other: int) -> bool:
    """True if children of ``thread`` of process ``pid`` get the same surroundings as those of
    ``other``. False also if that cannot be seen."""
    try:
        return _surroundings(pid, thread or pid) == _surroundings(other, other)
    except (OSError, ValueError):
        return False


def parent_of(pid: int) -> int:
    """Return a process's parent; 0 if the process has ended."""
    try:
        return process_stat.read(pid).parent
    except (OSError, ValueError):
        return 0


def environ_of(pid: int, most: int = -1) -> dict[str, str]:
    """Return the environment of a process at its start, as far as its first ``most`` bytes have it;
    {} if the process has gone."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            words = file.read(most).split(b"\0")
    except OSError:
        return {}
    return dict(os.fsdecode(word).split("=", 1) for word in words if b"=" in word)


def _surroundings(pid: int, thread: int) -> dict[str, object]:
    """Read a process's surroundings. Raises OSError, ValueError."""
    task = Path(f"/proc/{pid}/task/{thread}")
    found: dict[str, object] = {str(p.name): str(p.readlink()) for p in (task / "ns").iterdir()}
    root = (task / "root").stat()
    found["root"] = (root.st_dev, root.st_ino)
    for name in ("limits", "cgroup", "oom_score_adj"):
        found[name] = (task / name).read_text()
    for line in (task / "status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _STATUS:
            found[name] = value
    fields = process_stat.read(f"{pid}/task/{thread}").fields
    found["scheduling"] = [fields[number - 3] for number in (19, 40, 41)]  # nice, rt, policy
    return found
