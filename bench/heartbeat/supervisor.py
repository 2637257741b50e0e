"""Case ``supervisor``: CPU, memory and start-up of one supervisor of 1,250 nodes × 8 ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common import MIN_SAMPLES, REPOSITORY, Results
from bench.heartbeat.load import NODES, CounterFile, Counters
from robust_slurm import process_stat

START_UP = 60.0  # s for all nodes to be connected and started
WARM_UP = 5.0
SAMPLE = 1.0
SECONDS = 30
_TICKS = os.sysconf("SC_CLK_TCK")


def supervisor(results: Results) -> None:
    """Start it several times for the start-up, and watch the last one run."""
    hellos: list[float] = []
    orders: list[float] = []
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    for run in range(runs):
        with loaded() as (pid, counters):
            found = _until(counters, lambda c: c.started > 0)
            hellos.append(found.complete - found.connected)
            orders.append(found.started - found.complete)
            if run == runs - 1:
                _watch(results, pid, counters)
    results.add("supervisor.hellos_s", hellos, "s")
    results.add("supervisor.start_orders_s", orders, "s")


def _watch(results: Results, pid: int, counters: CounterFile) -> None:
    time.sleep(WARM_UP)
    cpu: list[float] = []
    rate: list[float] = []
    memory: list[float] = []
    for _ in range(5 if results.quick else SECONDS):
        before, heard, began = cpu_seconds(pid), counters.read().messages, time.monotonic()
        time.sleep(SAMPLE)
        used, now = cpu_seconds(pid) - before, time.monotonic()
        cpu.append(100 * used / (now - began))
        rate.append((counters.read().messages - heard) / (now - began))
        memory.append(rss_mb(pid))
    results.add("supervisor.cpu_percent", cpu, "% of one core")
    results.add("supervisor.messages_per_s", rate, "1/s")
    results.add("supervisor.rss_mb", memory, "MB")


@contextmanager
def loaded() -> Iterator[tuple[int, CounterFile]]:
    """A supervisor with all its nodes, as (its pid, its counters)."""
    with tempfile.TemporaryDirectory(prefix="bench-supervisor-") as directory:
        counters = Path(directory) / "counters"
        file = CounterFile(counters, create=True)
        argv = [
            sys.executable,
            "-m",
            "bench.heartbeat.load",
            "serve",
            directory,
            str(counters),
        ]
        with subprocess.Popen(argv, cwd=REPOSITORY, start_new_session=True) as child:
            try:
                yield child.pid, file
            finally:
                # The feeder is in the same session; nothing of ours is worth an orderly end.
                os.killpg(child.pid, signal.SIGKILL)


def _until(file: CounterFile, ready: Callable[[Counters], bool]) -> Counters:
    """Wait for the counters. TimeoutError with what was reached."""
    deadline = time.monotonic() + START_UP
    while not ready(found := file.read()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{NODES} nodes were not started within {START_UP:g} s: {found}")
        time.sleep(0.05)
    return found


def cpu_seconds(pid: int) -> float:
    """User and system CPU seconds that a process and all its threads have used."""
    return process_stat.read(pid).ticks / _TICKS


def rss_mb(pid: int) -> float:
    """Resident memory of a process in MB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ProcessLookupError(f"process {pid} has ended")
