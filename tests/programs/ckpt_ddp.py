"""DDP: dropout, batch normalization, AdamW, a schedule, draws from Python's and numpy's RNG."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import random

import numpy as np
import torch
from ckpt_training import WIDTH, Ballast, Reader, Training, join_world, options, seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

args = options()
rank, world = join_world()
seed(1)
network = nn.Sequential(
    nn.Linear(WIDTH, 16),
    nn.BatchNorm1d(16),
    nn.ReLU(),
    nn.Dropout(0.2),
    nn.Linear(16, 1),
    Ballast(args.ballast),
)
model = DistributedDataParallel(network)
# DDP orders what it adds up anew after its first backward pass: that must not be one that counts.
model.eval()
model(torch.zeros(2, WIDTH)).sum().backward()
model.zero_grad(set_to_none=True)
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
seed(100 + rank)
reader = Reader(rank, world)
training = Training(args, rank, reader, model, optimizer, {"schedule": schedule})

for step, ids, inputs, targets in training.steps():
    noise = 1 + 0.01 * random.random() + 0.01 * float(np.random.rand())
    loss = (model(inputs * noise) - targets).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    training.amid(step)
    schedule.step()
    training.done(step, loss.item(), ids)
training.close()
