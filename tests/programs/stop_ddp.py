"""DDP that says its loss; a machine begins to compute wrongly, or the program itself does.

``--wrong=EPOCH:STEP``: from that step on the switch of ``wrong/sitecustomize.py`` is on.
``--nan=STEP``: the program itself makes its loss NaN, whenever it comes to that step.
``--vary=NODE``: ranks on that node compute a little more; ``--vary=always``: all do, each time
another little.
``--unfit=raise``: every rank ends with an error when its loss is not finite.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import math
import os
import random
from pathlib import Path

import torch
from ckpt_training import WIDTH, Reader, Training, join_world, options, seed
from teardown import fail
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm

args = options("wrong", "nan", "unfit", "vary")
wrong = tuple(map(int, args.wrong.split(":"))) if args.wrong else ()
rank, world = join_world()
seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)))
# DDP orders what it adds up anew after its first backward pass: that must not be one that counts.
model(torch.zeros(2, WIDTH)).sum().backward()
model.zero_grad(set_to_none=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
seed(100 + rank)
training = Training(args, rank, Reader(rank, world), model, optimizer, {})

for step, ids, inputs, targets in training.steps():
    if (robust_slurm.epoch(), step) == wrong:
        Path(os.environ["LAB_WRONG_FILE"]).touch()
    loss = (model(inputs) - targets).square().mean()
    if str(step) == args.nan:
        loss = loss * math.nan
    if args.vary == "always":
        loss = loss * (1 + 1e-3 * random.SystemRandom().random())
    elif args.vary == os.environ.get("SLURMD_NODENAME"):
        loss = loss * 1.001
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    training.amid(step)
    value = loss.item()
    robust_slurm.beat(step, loss=None if args.unfit else value)
    if args.unfit and not math.isfinite(value):
        try:
            raise RuntimeError(f"rank {rank}: the loss is {value} at step {step}")
        except RuntimeError as error:
            fail(error)
    training.done(step, value, ids)
training.close()
