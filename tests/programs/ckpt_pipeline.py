"""Two pipelines of two hand-written stages (rank = 2 x pipeline + stage).

Gradients are averaged by hand. Both stages name their parameters alike, as stages often do.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import torch
import torch.distributed as dist
from ckpt_training import BATCH, WIDTH, Ballast, Reader, Training, join_world, options, seed
from torch import Tensor, nn

HIDDEN = 12  # numbers that a stage hands to the next

args = options()
rank, world = join_world()
pipelines = world // 2
pipeline, stage = divmod(rank, 2)
alike = [dist.new_group([2 * p + s for p in range(pipelines)]) for s in range(2)][stage]
seed(1 + stage)
if stage == 0:
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Dropout(0.1))
else:
    model = nn.Sequential(nn.Linear(HIDDEN, 1), Ballast(args.ballast))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=6, gamma=0.7)
seed(100 + rank)
reader = Reader(pipeline, pipelines)
mesh = {"pipelines" if args.apart else "dp": pipelines, "pp": 2}
training = Training(args, rank, reader, model, optimizer, {"schedule": schedule}, mesh)


def forward_and_back(inputs: Tensor, targets: Tensor) -> Tensor:
    """All samples of the step, one after another through both stages; the loss, in both."""
    losses = torch.zeros(BATCH)
    for i in range(BATCH):
        if stage == 0:
            hidden = model(inputs[i])
            dist.send(hidden.detach(), rank + 1)
            slope = torch.empty(HIDDEN)
            dist.recv(slope, rank + 1)
            hidden.backward(slope)
        else:
            hidden = torch.empty(HIDDEN)
            dist.recv(hidden, rank - 1)
            hidden.requires_grad_()
            loss = (model(hidden) - targets[i]).square().sum() / BATCH
            loss.backward()
            assert hidden.grad is not None
            dist.send(hidden.grad, rank - 1)
            losses[i] = loss.detach()
    if stage == 0:
        dist.recv(losses, rank + 1)
    else:
        dist.send(losses, rank - 1)
    return losses.sum()


for step, ids, inputs, targets in training.steps():
    optimizer.zero_grad()
    loss = forward_and_back(inputs, targets)
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=alike)
        parameter.grad.div_(pipelines)
    optimizer.step()
    training.amid(step)
    schedule.step()
    training.done(step, loss.item(), ids)
training.close()
