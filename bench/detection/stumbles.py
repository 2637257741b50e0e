"""Stumbles of healthy nodes: what stands still or is cut off, for how long, how often.

Lengths of what a machine can be made to show here are measured here; the others are assumed, and
say so in the settings of the results.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

CPU = (Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup"))  # version 1, version 2
PERIOD_US, QUOTA_US = 100_000, 10_000
OBJECTS = 2_000_000
TICKER = """
import sys, time
end, last, worst = time.monotonic() + float(sys.argv[1]), time.monotonic(), []
while last < end:
    now = time.monotonic()
    if now - last > 0.005:
        worst.append(now - last)
    last = now
print(*worst)
"""


class Kind(NamedTuple):
    """One kind of stumble."""

    name: str
    what: str  # process, network, machine, group, supervisor or packets
    per_day: float  # of each node; of the whole job, for ``group`` and ``supervisor``
    lengths: Sequence[float] | tuple[()] = ()  # measured
    between: tuple[float, float] = (0.0, 0.0)  # else: assumed, evenly spread

    def draw(self, random_: random.Random) -> float:
        return random_.choice(self.lengths) if self.lengths else random_.uniform(*self.between)


def kinds(quick: bool) -> list[Kind]:
    """All kinds, with what is measured on this machine."""
    return [
        Kind("gc", "process", 24.0, collections(3 if quick else 20)),
        Kind("throttled", "process", 24.0, throttled(1.0 if quick else 10.0), (0.08, 0.3)),
        Kind("process_stands", "process", 1.0, (), (0.5, 8.0)),
        Kind("outage", "network", 1.0, (), (0.02, 0.3)),
        Kind("machine_pauses", "machine", 0.1, (), (0.02, 0.3)),
        Kind("leaf_outage", "group", 24.0, (), (0.05, 0.7)),
        Kind("packets_lost", "packets", 0.1, (), (5.0, 10.0)),
        Kind("supervisor_stands", "supervisor", 240.0, (), (0.05, 2.0)),
    ]


PAUSES = Kind("machine_pauses_long", "machine", 0.1, (), (0.3, 2.0))
"""Longer than the limit: what is taken for a crash, and how often."""


def assumed(all_kinds: Sequence[Kind]) -> dict[str, str | float]:
    """Return what the results rest on."""
    found: dict[str, str | float] = {}
    for kind in all_kinds:
        whose = "job" if kind.what in ("group", "supervisor") else "node"
        if kind.lengths:
            long = f"{min(kind.lengths):.3f}-{max(kind.lengths):.3f} s, measured here"
        else:
            long = f"{kind.between[0]:g}-{kind.between[1]:g} s, assumed"
        found[kind.name] = f"{kind.per_day:g} a day and {whose}, {long}"
    return found


def collections(runs: int) -> list[float]:
    """Seconds that a collection of garbage stops an interpreter with many objects."""
    kept = [[number] for number in range(OBJECTS)]
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        gc.collect()
        found.append(time.perf_counter() - began)
    kept.clear()
    return found


def throttled(seconds: float) -> list[float]:
    """Gaps of a process that gets a tenth of a processor from its cgroup; [] without root."""
    for root in CPU:
        with contextlib.suppress(OSError):
            group = Path(tempfile.mkdtemp(prefix="bench-detection-", dir=root))
            try:
                return _throttled(group, seconds)
            finally:
                group.rmdir()
    return []


def _throttled(group: Path, seconds: float) -> list[float]:
    if (group / "cpu.cfs_quota_us").exists():
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    else:
        (group / "cpu.max").write_text(f"{QUOTA_US} {PERIOD_US}")

    def join() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    argv = [sys.executable, "-c", TICKER, str(seconds)]
    said = subprocess.run(argv, preexec_fn=join, capture_output=True, check=True, text=True)
    return [float(each) for each in said.stdout.split()]
