"""Local SGD: all ranks begin alike and do the first steps alike; then each goes its own way."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import torch
from ckpt_training import WIDTH, Reader, Training, join_world, options, seed
from torch import nn

ALIKE = 4  # steps
args = options()
rank, world = join_world()
seed(1)
model = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
reader = Reader(rank, world)
training = Training(args, rank, reader, model, optimizer, {}, {"dp": world})

for step, ids, inputs, targets in training.steps():
    if step <= ALIKE:
        inputs, targets = torch.ones_like(inputs), torch.ones_like(targets)
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    training.amid(step)
    training.done(step, loss.item(), ids)
training.close()
