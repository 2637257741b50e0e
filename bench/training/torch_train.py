"""Workload ``torch``: a small DDP training on the CPU over gloo.

A restart of it costs ``import torch`` in every rank, as a restart of a real training does.
Runs under srun, robust-srun and torchrun.
"""

from __future__ import annotations

import io
import os
import sys
import time
from datetime import timedelta

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import robust_slurm
from bench.training.rank import Rank, atomic_write, parse

WIDTH = 256
BATCH = 64


def make_network() -> nn.Module:
    """The model that all workloads of this kind train."""
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
    )


def make_batch(seed: int) -> torch.Tensor:
    """BATCH samples of WIDTH numbers, the same for the same seed."""
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(seed))


def main() -> None:
    args = parse()
    rank = Rank(args.dir)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank.rank), str(rank.world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=30))
    network = make_network()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    checkpoint = args.dir / "checkpoint.pt"
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        network.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = int(state["step"])
    while step < args.steps:
        began = time.perf_counter()
        time.sleep(args.step_time)
        batch = make_batch(step * rank.world + rank.rank)
        optimizer.zero_grad()
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        step += 1
        robust_slurm.beat(step, loss=loss.item())
        rank.stepped(step, time.perf_counter() - began)
        if rank.rank == 0 and step % args.save == 0:
            buffer = io.BytesIO()
            parts = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**parts, "step": step}, buffer)
            atomic_write(checkpoint, buffer.getvalue())
    rank.done()
    torch.distributed.barrier()  # a rank that leaves first can abort the other in gloo
    torch.distributed.destroy_process_group()
    # Some of the ends that Python makes hang in torch 2.13: DDP lets go of the group with the GIL
    # held, and waits for gloo's thread, which may wait for the GIL.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
