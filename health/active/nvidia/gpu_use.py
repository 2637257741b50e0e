"""The NVIDIA GPUs of this node, and what uses them: a test needs a GPU to itself.

NVML is asked in a process of its own: a driver that hangs holds only that one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import NamedTuple

from health.active.nvidia import tools
from robust_slurm import commands

DEADLINE_S = 20.0  # without persistence mode, eight GPUs take some 10 s to start


class GpuUse(NamedTuple):
    """One GPU. ``number``: NVML's index; ``error``: NVML's name for why it does not answer."""

    number: int
    processes: tuple[int, ...] = ()
    mig: bool = False
    error: str = ""


def take(deadline_s: float = DEADLINE_S) -> tuple[GpuUse, ...]:
    """Return the GPUs; none where there is no NVIDIA GPU. Those asked after the deadline lack."""
    module = "health.active.nvidia.gpu_nvml"
    plain = [sys.executable, "-I" if sys.flags.isolated else "-P", *commands.words(module)]
    argv = commands.again(module) if sys.flags.no_site else plain
    try:
        ran = tools.run(argv, deadline_s, os.environ)
    except OSError:
        return ()
    found = []
    for line in ran.out.splitlines():
        try:
            number, processes, mig, error = json.loads(line)
        except ValueError:
            continue  # cut off by the deadline
        found.append(GpuUse(int(number), tuple(map(int, processes)), bool(mig), str(error)))
    return tuple(found)


def busy(gpus: tuple[GpuUse, ...]) -> tuple[str, ...]:
    """The reasons not to start a test that needs the GPUs to itself: one line per GPU in use."""
    lines = []
    for gpu in gpus:
        if gpu.processes:
            some = ", ".join(map(str, gpu.processes[:8]))
            lines.append(f"gpu{gpu.number} is used by process {some}")
        if gpu.mig:
            lines.append(f"gpu{gpu.number} has MIG on")
    return tuple(lines)
