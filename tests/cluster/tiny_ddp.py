"""A DDP training of seconds, for fault tests; no call to robust_slurm: torch's hook must do.

Model and data follow from the step's number, so an interrupted run that resumes right ends with
exactly the loss of one that was not. Rank 0 saves by atomic rename every ``--save`` steps.
"""

# ruff: noqa: E402 - imports after the first statement, see there
from __future__ import annotations

import gc

gc.disable()  # torch's modules are no garbage; unsearched they load faster

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--save", type=int, default=10)
parser.add_argument("--waits", type=int, default=0, help="so many epochs stay in step 25 for long")
parser.add_argument("--linger", type=float, default=0.0, help="rank r ends r times as late, in s")
args = parser.parse_args()
WAIT_AT = 25

sys.path.append(str(Path(__file__).parents[1] / "programs"))
import without_compiler
from teardown import leave

without_compiler.install()

torch.set_num_threads(1)
torch.manual_seed(0)
epoch = int(os.environ.get("ROBUST_EPOCH", "1"))
dist.init_process_group("gloo")
rank = dist.get_rank()
network = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
model = DistributedDataParallel(network)
# DDP orders what it adds up anew after the first step: that must not be a step that counts.
model(torch.zeros(8, 16)).sum().backward()
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
path = args.dir / "checkpoint.pt"
step = 0
if path.exists():
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = int(state["step"])
loss = torch.zeros(())
while step < args.steps:
    step += 1
    time.sleep(0.02)
    if epoch <= args.waits and step == WAIT_AT:
        (args.dir / f"waiting.{epoch}.{rank}").touch()
        patience = time.monotonic() + 300  # for the test to make a fault, or to let it go on
        while not (args.dir / "go").exists() and time.monotonic() < patience:
            time.sleep(0.05)
    batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + rank))
    optimizer.zero_grad()
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    if rank == 0 and step % args.save == 0:
        part = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        temporary = path.with_suffix(".tmp")
        torch.save(part, temporary)
        temporary.replace(path)
if rank == 0:
    final = {"step": step, "loss": float(loss.detach()), "epoch": epoch}
    (args.dir / "final.json").write_text(json.dumps(final))
dist.barrier()
dist.destroy_process_group()
time.sleep(rank * args.linger)
# One write: torchrun's ranks share a pipe, and print() may write the newline by itself.
os.write(1, f"rank {rank} done on {os.environ['SLURMD_NODENAME']}\n".encode())
leave()
