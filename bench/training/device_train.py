"""Workload ``device``: DDP on a GPU over NCCL, in ``robust_slurm.resilient``, with a Checkpointer.

Rank 0 notes the loss of share 0 in each step and the sum of all weights' bits after it (STEPS): a
run with faults must have noted what one without has, step for step. With ``--device cpu`` it runs
over gloo. It goes on in a world of another size (``--robust-min-nodes``), in which sums are
rounded otherwise.
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
from bench.training.rank import Rank, append, parse

STEPS = "steps.txt"
"""A line for each step: its number, the loss, the sum of the weights' bits."""
WIDTH = {"cpu": 64, "cuda": 512}
BATCH = 64


def main() -> None:
    args = parse()
    on_gpu = args.device == "cuda"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits each time
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = WIDTH[args.device]
    network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    network.to(args.device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def batch_of(step: int, share: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step * robust_slurm.world().original + share)
        return torch.randn(BATCH, width, generator=generator).to(args.device)

    @robust_slurm.resilient
    def train() -> None:
        rank = Rank(args.dir)
        backend = "nccl" if on_gpu else "gloo"
        torch.distributed.init_process_group(backend, timeout=timedelta(minutes=30))
        model = DistributedDataParallel(network)
        # DDP orders what it adds up anew after its first backward pass: not one that counts.
        model(batch_of(0, rank.rank)).square().mean().backward()
        optimizer.zero_grad()
        checkpointer = robust_slurm.Checkpointer(model=model, optimizer=optimizer)
        whole = robust_slurm.world()
        for step in range(checkpointer.resume() + 1, args.steps + 1):
            began = time.perf_counter()
            time.sleep(args.step_time)
            optimizer.zero_grad()
            losses = []
            for share in robust_slurm.accumulate(model):
                batch = batch_of(step, share)
                losses.append((model(batch) - batch).square().mean())
                torch.autograd.backward(losses[-1] * whole.scale)
            optimizer.step()
            value = losses[0].item()
            robust_slurm.beat(step, loss=value)
            checkpointer.save(step)
            rank.stepped(step, time.perf_counter() - began)
            if rank.rank == 0:
                append(args.dir / STEPS, f"{step} {value.hex()} {bits(network)}")
        rank.done()
        torch.distributed.barrier()

    train()
    sys.stdout.flush()
    os._exit(0)  # as torch_train


def bits(network: nn.Module) -> int:
    """Return the sum of all weights, each taken for the integer that its bits are."""
    with torch.no_grad():
        sums = [each.detach().view(torch.int32).sum() for each in network.parameters()]
        return int(torch.stack(sums).sum())


if __name__ == "__main__":
    main()
