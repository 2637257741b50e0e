"""A DDP training in ``resilient()``; no Checkpointer: it begins at step 0 each time.

``rejoin_ddp.py DIR FAULT...``: in the step HELD of epoch n the rank that ``FAULT`` n names
(``stop:2``) waits for DIR/go.n and then does that. What happens is said on stdout.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import without_compiler
from teardown import leave
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm

HELD, STEPS = 4, 8
without_compiler.install()
directory = Path(sys.argv[1])
torch.set_num_threads(1)
network = nn.Linear(16, 1)


def tell(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def fault(rank: int) -> None:
    epoch = robust_slurm.epoch()
    what, _, who = sys.argv[1 + epoch].partition(":") if len(sys.argv) > 1 + epoch else ("", "", "")
    if str(rank) != who:
        return
    tell("held", epoch)
    while not (directory / f"go.{epoch}").exists():
        time.sleep(0.01)
    if what == "raise":
        raise ValueError("a bad sample")
    os.kill(os.getpid(), signal.SIGSTOP if what == "stop" else signal.SIGKILL)


@robust_slurm.resilient
def train() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for parameter in network.parameters():
        nn.init.ones_(parameter)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    tell("begins", robust_slurm.epoch())
    loss = torch.zeros(())
    for step in range(STEPS):
        if step == HELD:
            fault(rank)
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        robust_slurm.beat(step, loss=loss.item())
    tell("ends", robust_slurm.epoch(), loss.item().hex())
    dist.barrier()
    dist.destroy_process_group()


train()
leave()
