"""FSDP2 on CPUs: parameters in shards, some uneven, one so small that a rank has none of it."""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import torch
from ckpt_training import WIDTH, Ballast, Reader, Training, join_world, options, seed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

args = options()
rank, world = join_world()
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
seed(1)
model = nn.Sequential(
    nn.Sequential(nn.Linear(WIDTH, 15), nn.Tanh(), nn.Dropout(0.1)),
    nn.Sequential(nn.Linear(15, 7), nn.LayerNorm(7), nn.Tanh()),
    nn.Sequential(nn.Linear(7, 1), Ballast(args.ballast)),
)
for block in model:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.8)
seed(100 + rank)
reader = Reader(rank, world)
training = Training(args, rank, reader, model, optimizer, {"schedule": schedule}, mesh)

for step, ids, inputs, targets in training.steps():
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    training.amid(step)
    schedule.step()
    training.done(step, loss.item(), ids)
training.close()
