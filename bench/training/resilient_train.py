"""Workload ``resilient``: as ``torch``, in ``robust_slurm.resilient`` and with a Checkpointer.

Weights and optimizer are made once in a process. With ``--robust-rejoin-limit=0`` all ranks are
restarted, so that both ways can be measured on one script.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
from torch.nn.parallel import DistributedDataParallel

import robust_slurm
from bench.training.rank import Rank, parse
from bench.training.torch_train import make_batch, make_network


def main() -> None:
    args = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    @robust_slurm.resilient
    def train() -> None:
        rank = Rank(args.dir)
        torch.distributed.init_process_group("gloo", timeout=timedelta(minutes=30))
        model = DistributedDataParallel(network)
        checkpointer = robust_slurm.Checkpointer(model=model, optimizer=optimizer)
        for step in range(checkpointer.resume() + 1, args.steps + 1):
            began = time.perf_counter()
            time.sleep(args.step_time)
            batch = make_batch(step * rank.world + rank.rank)
            optimizer.zero_grad()
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            robust_slurm.beat(step, loss=loss.item())
            checkpointer.save(step)
            rank.stepped(step, time.perf_counter() - began)
        rank.done()
        torch.distributed.barrier()

    train()
    sys.stdout.flush()
    os._exit(0)  # as torch_train


if __name__ == "__main__":
    main()
