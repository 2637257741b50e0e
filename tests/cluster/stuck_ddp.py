"""A gloo training of tiny steps in which one rank, or a worker of its loader, gets stuck.

The rank then has a killed child for which it does not wait.

Stuck until a file ``go`` is there; then it goes on to its end, as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import robust_slurm

sys.path.append(str(Path(__file__).parents[1] / "programs"))
from teardown import leave

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--rank", type=int, default=3)
parser.add_argument("--at", type=int, default=20)
parser.add_argument("--loader", action="store_true", help="a worker of its loader deadlocks")
args = parser.parse_args()


def stuck() -> None:
    (args.dir / "stuck").touch()
    held = threading.Lock()
    held.acquire()
    while not (args.dir / "go").exists():
        held.acquire(timeout=0.5)


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return int(args.steps)

    def __getitem__(self, index: int) -> int:
        if args.loader and rank == args.rank and index == args.at:
            stuck()
        return index


def batches() -> Iterator[int]:
    if args.loader:
        for batch in DataLoader(Numbers(), batch_size=1, num_workers=2, prefetch_factor=2):
            yield int(batch[0])
    else:
        yield from range(args.steps)


def train() -> None:
    for step, number in enumerate(batches(), 1):
        time.sleep(0.05)
        if not args.loader and rank == args.rank and step == args.at:
            child = subprocess.Popen(["sleep", "600"])
            child.kill()
            stuck()
            child.wait()
        total = torch.tensor([float(number)])
        dist.all_reduce(total)
        robust_slurm.beat(step, loss=float(total))


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
train()
dist.barrier()
dist.destroy_process_group()
os.write(1, f"rank {rank} done on {os.environ['SLURMD_NODENAME']}\n".encode())
leave()
