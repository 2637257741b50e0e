"""A torch DDP training as many have it: gloo, checkpoints of its own, an idle evaluation.

ddp.py [--steps N] [--evaluate SECONDS] [--save SECONDS]; under srun it reads Slurm's variables.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import here  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--evaluate", type=float, default=0.0, help="wait so long at step 40")
parser.add_argument("--save", type=float, default=0.0, help="rank 0 saves so long at step 30")
parser.add_argument("--late", type=float, default=0.0, help="rank 1 joins so much later")
parser.add_argument("--from-scratch", action="store_true", help="never resume")
args = parser.parse_args()
here.started()
os.environ.setdefault("RANK", os.environ["SLURM_PROCID"])
os.environ.setdefault("WORLD_SIZE", os.environ["SLURM_NTASKS"])
torch.set_num_threads(1)
torch.manual_seed(0)
if os.environ["RANK"] == "1":
    time.sleep(args.late)
dist.init_process_group("gloo")
rank = dist.get_rank()
network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
path, step, loss = Path("checkpoint.pt"), 0, torch.zeros(())
if path.exists() and not args.from_scratch:
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = int(state["step"])
while step < args.steps:
    step += 1
    time.sleep(0.05)
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if step == 40:
        time.sleep(args.evaluate)
    if rank == 0 and step % 10 == 0:
        if step == 30:
            time.sleep(args.save)
        part = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(part, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)
if rank == 0:
    Path("final.json").write_text(json.dumps([step, round(float(loss.detach()), 5)]))
    print("rank 0 is done")
dist.barrier()
dist.destroy_process_group()
