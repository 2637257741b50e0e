"""DDP in ``resilient()``: weights and optimizer are made once in a process, all else each time."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import os
import signal
import time

import torch
from ckpt_training import WIDTH, Reader, Training, join_world, options, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm

args = options("fault")
"""--fault=EPOCH:STEP:RANK:WHAT,…: what happens to a rank amid a step: kill, raise, stop."""
faults = [each.split(":") for each in filter(None, args.fault.split(","))]
seed(1)
network = nn.Sequential(
    nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
)
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
begun: list[bool] = []


def suffer(step: int, rank: int) -> None:
    for epoch, at, who, what in faults:
        if (robust_slurm.epoch(), step, rank) != (int(epoch), int(at), int(who)):
            continue
        if what == "raise":
            raise ValueError(f"a bad sample in step {step}")
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        time.sleep(60)


@robust_slurm.resilient
def train() -> None:
    rank, world = join_world()
    model = DistributedDataParallel(network)
    # DDP orders what it adds up anew after its first backward pass: that must not be one that
    # counts.
    model.eval()
    model(torch.zeros(2, WIDTH)).sum().backward()
    model.train()
    if not begun:  # else the gradients of the step that was cut off are resume()'s to drop
        model.zero_grad(set_to_none=True)
    begun.append(True)
    with (args.dir / f"pids-{rank}").open("a") as file:
        file.write(f"{os.getpid()}\n")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
    seed(100 + rank)
    reader = Reader(rank, world)
    training = Training(args, rank, reader, model, optimizer, {"schedule": schedule})
    for step, ids, inputs, targets in training.steps():
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        suffer(step, rank)
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        training.done(step, loss.item(), ids)
    training.close()


train()
