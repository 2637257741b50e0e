"""Memory and CPU time of a lab's processes, as /proc shows them to root."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_MB = 1e6


class Group(NamedTuple):
    """The processes of one name. ``mb``: their proportional set sizes (PSS) together."""

    number: int
    mb: float


def parse_kib(text: str, key: str) -> int:
    """A value in kB of /proc/meminfo or smaps_rollup, in KiB; 0 if it is not there."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    return 0


def available_mb() -> float:
    """The memory that the machine has left, in MB."""
    return parse_kib(Path("/proc/meminfo").read_text(), "MemAvailable") * 1024 / _MB


def by_name(proc: Path = Path("/proc"), *, without: Iterable[int] = ()) -> dict[str, Group]:
    """All processes but those ``without``, by their names. One that ends meanwhile is left out.

    A page that several processes have in common counts for each of them in part (PSS), so the sum
    is the memory that they take.
    """
    left_out = {str(pid) for pid in without}
    found: dict[str, Group] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit() or entry.name in left_out:
            continue
        try:
            name = (entry / "comm").read_text().strip()
            mb = parse_kib((entry / "smaps_rollup").read_text(), "Pss") * 1024 / _MB
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        before = found.get(name, Group(0, 0.0))
        found[name] = Group(before.number + 1, before.mb + mb)
    return found


def pids(proc: Path = Path("/proc")) -> set[int]:
    """Return the ids of all processes."""
    return {int(entry.name) for entry in proc.iterdir() if entry.name.isdigit()}


def cpu_s(pid: int, proc: Path = Path("/proc")) -> float:
    """The CPU time of a process so far, in seconds."""
    fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_mb(pid: int, proc: Path = Path("/proc"), key: str = "VmRSS") -> float:
    """The resident memory of a process in MB; ``key`` "VmHWM": the most it ever had."""
    return parse_kib((proc / str(pid) / "status").read_text(), key) * 1024 / _MB


def find(name: str, environ: Mapping[str, str], proc: Path = Path("/proc")) -> list[int]:
    """Return the ids of the processes of that name that started with these variables."""
    wanted = {f"{key}={value}".encode() for key, value in environ.items()}
    found = []
    for entry in proc.iterdir():
        try:
            if not entry.name.isdigit() or (entry / "comm").read_text().strip() != name:
                continue
            if wanted <= set((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return sorted(found)
