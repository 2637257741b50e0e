"""Workload ``torchft``: the training of ``saved`` as torchft has it, a replica group a process.

Its manager and lighthouse have the quickest time limits that it takes well with gloo. Nothing is
saved: a replica that comes gets the state of one that is there. It keeps no global batch; its step
is smaller while a replica is missing. Each replica notes its own steps: all of them are rank 0.
It needs torchft's nightly build: the DDP of 0.2.0 raises where an all-reduce over gloo fails.
"""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch import nn

from bench.training.rank import Rank, parse, step_file
from bench.training.saved_train import BATCH, WIDTH

TIMEOUT = timedelta(seconds=5)
QUORUM = timedelta(seconds=60)


def main() -> None:
    args = parse()
    torchft: Any = import_module("torchft")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
    inner = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)

    def load(state: dict[str, Any]) -> None:
        network.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    host, port = socket.gethostname(), int(os.environ["MASTER_PORT"])
    distributed: Any = import_module("torch.distributed")
    store = distributed.TCPStore(host, port, None, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": network.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=int(os.environ["MIN_REPLICA_GROUPS"]),
        timeout=TIMEOUT,
        quorum_timeout=QUORUM,
        init_sync=False,
        store_addr=host,
        store_port=store.port,
    )
    model = torchft.DistributedDataParallel(manager, network)
    optimizer = torchft.Optimizer(manager, inner)
    replica = int(os.environ["REPLICA_GROUP_ID"])
    rank = Rank(args.dir, step_file(replica))
    while (step := manager.current_step()) < args.steps:
        began = time.perf_counter()
        time.sleep(args.step_time)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step * 1000 + replica)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        torch.autograd.backward((model(batch) - batch).square().mean())
        optimizer.step()
        if manager.current_step() > step:
            rank.stepped(manager.current_step(), time.perf_counter() - began)


if __name__ == "__main__":
    main()
