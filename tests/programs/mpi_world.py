"""A program of steps that is an MPI program: each step has a barrier of Open MPI, called by ctypes.

The library is the system's; no package of Python is needed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from pathlib import Path

import robust_slurm

parser = argparse.ArgumentParser()
parser.add_argument("dir", type=Path)
parser.add_argument("steps", type=int)
parser.add_argument("--die", type=int, default=0, help="rank 1 dies after this step, in one run")
args = parser.parse_args()
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)  # its own plugins look for it
world = ctypes.byref(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world"))
rank, size = ctypes.c_int(), ctypes.c_int()
assert mpi.MPI_Init(None, None) == 0
assert mpi.MPI_Comm_rank(world, ctypes.byref(rank)) == 0
assert mpi.MPI_Comm_size(world, ctypes.byref(size)) == 0
for step in range(1, args.steps + 1):
    time.sleep(0.03)
    assert mpi.MPI_Barrier(world) == 0
    robust_slurm.beat(step)
    if rank.value == 0:
        print(f"step {step} of a world of {size.value}", flush=True)
    elif step == args.die and not (args.dir / "died").exists():
        (args.dir / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
assert mpi.MPI_Finalize() == 0
