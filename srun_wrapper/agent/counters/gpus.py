"""Read the GPUs' error counters in a process of its own, since NVML may hang."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import msgspec

from robust_slurm import commands

DRIVER = Path("/proc/driver/nvidia/gpus")
PROGRAM = "health.nvidia.error_counters"
SECONDS = 10.0  # NVML's start takes seconds where no persistence daemon keeps the driver up
DIES = 1.0  # s for it to end after SIGKILL: then it is left behind, the driver holds it

asking: set[int] = set()
"""Pids of these processes: they are no ranks', so no rank's end waits for them."""


def read() -> dict[str, int]:
    """Return all counters by name ("GPU 0000:3b:00.0 NVLink 3 replay errors"), {} without GPUs.

    Takes as long as the process: not for a loop's thread.
    """
    if not DRIVER.is_dir():
        return {}
    return answer([sys.executable, *commands.own_words(PROGRAM)], SECONDS)


def answer(command: list[str], seconds: float) -> dict[str, int]:
    """Return the counters that a command prints within so many seconds."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    asking.add(child.pid)
    try:
        said, _ = child.communicate(timeout=seconds)
        return msgspec.json.decode(said, type=dict[str, int])
    except (subprocess.TimeoutExpired, msgspec.MsgspecError):
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(DIES)
        return {}
    finally:
        if child.poll() is not None:
            asking.discard(child.pid)
