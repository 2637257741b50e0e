"""DDP that tells its loss, and in which a NaN comes up: ``--nan=EPOCH:STEP:RANK:WHERE``.

EPOCH 0 means each. WHERE: ``data``, so that the loss of that step is NaN already; ``gradient``, so
that only the next one is, when the state has been saved with NaN in it; ``machine``, as data, but
on the node where RANK was first, whatever its rank is now. ``--order=late``: the step
is saved before its loss is told. ``--flip=EPOCH:STEP:RANK``: as by a fault of its memory, a
bit of one of that rank's weights changes after that step.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import math
import os

import torch
from ckpt_training import WIDTH, Reader, Training, join_world, options, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm

args = options("nan", "order", "flip")
epoch, at, whose, where = (args.nan or "0:0:0:-").split(":")
rank, world = join_world()
machine, node = args.dir / "machine", os.environ.get("SLURMD_NODENAME", "")
if where == "machine" and rank == int(whose) and not machine.exists():
    machine.write_text(node)
seed(1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
flip = tuple(map(int, args.flip.split(":"))) if args.flip else ()
seed(100 + rank)
training = Training(args, rank, Reader(rank, world), model, optimizer, {})

for step, ids, inputs, targets in training.steps():
    here = machine.read_text() == node if where == "machine" else rank == int(whose)
    bad = here and step == int(at) and int(epoch) in (0, robust_slurm.epoch())
    if bad and where in ("data", "machine"):
        inputs = inputs * math.nan
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad(set_to_none=True)
    (loss * math.nan if bad and where == "gradient" else loss).backward()
    optimizer.step()
    if (robust_slurm.epoch(), step, rank) == flip:
        with torch.no_grad():
            # A lower bit may be rounded away in later steps.
            next(model.parameters()).view(torch.int32)[0, 0] ^= 1 << 12
    value = loss.item()
    if args.order == "late":
        training.done(step, value, ids)
        robust_slurm.beat(step, loss=value)
    else:
        robust_slurm.beat(step, loss=value)
        training.done(step, value, ids)
training.close()
