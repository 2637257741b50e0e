"""Workload ``saved``: DDP over gloo whose every step is in memory, and whose batch keeps its size.

It goes on in a world of another size (``--robust-min-nodes``).
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm
from bench.training.rank import Rank, parse

WIDTH = 256
BATCH = 64


def main() -> None:
    args = parse()
    rank = Rank(args.dir)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=30))
    network = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    disk = {"directory": args.dir / "checkpoints", "every": args.save} if args.durable else {}
    checkpointer = robust_slurm.Checkpointer(model=model, optimizer=optimizer, **disk)
    whole = robust_slurm.world()
    for step in range(checkpointer.resume() + 1, args.steps + 1):
        began = time.perf_counter()
        time.sleep(args.step_time)
        optimizer.zero_grad()
        for share in robust_slurm.accumulate(model):
            generator = torch.Generator().manual_seed(step * whole.original + share)
            batch = torch.randn(BATCH, WIDTH, generator=generator)
            loss = (model(batch) - batch).square().mean()
            torch.autograd.backward(loss * whole.scale)
        optimizer.step()
        robust_slurm.beat(step, loss=loss.item())
        checkpointer.save(step)
        rank.stepped(step, time.perf_counter() - began)
    rank.done()
    checkpointer.close()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as torch_train does


if __name__ == "__main__":
    main()
