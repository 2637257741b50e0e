"""Workload ``nvrx``: the training of ``resilient`` in NVRx's in-process wrapper, beside it.

One process for each rank and one in reserve, as the wrapper starts none. Its intervals are the
quickest that it takes; gloo has no abort, so that its collectives get a short time limit in its
place. Its checks of GPUs are off. It saves nothing: what is measured ends with the first step.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bench.training.rank import Rank, parse
from bench.training.torch_train import make_batch, make_network

GLOO = timedelta(seconds=3)
QUICK = timedelta(seconds=0.25)
LAST_CALL = timedelta(seconds=0.5)
HANG = timedelta(seconds=10)  # robust-srun's hang_floor


def main() -> None:
    args = parse()
    inprocess: Any = import_module("nvidia_resiliency_ext.inprocess")
    distributed: Any = import_module("torch.distributed")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    port = int(os.environ["MASTER_PORT"]) + 1  # the wrapper has the other one
    first = os.environ["RANK"] == "0"
    store = distributed.TCPStore("127.0.0.1", port, None, first, wait_for_workers=False)

    def train(call_wrapper: Any = None) -> None:
        rank = Rank(args.dir)
        distributed.init_process_group(
            "gloo",
            store=distributed.PrefixStore(str(call_wrapper.iteration), store),
            rank=rank.rank,
            world_size=rank.world,
            timeout=GLOO,
        )
        model = DistributedDataParallel(network)
        for step in range(1, args.steps + 1):
            began = time.perf_counter()
            time.sleep(args.step_time)
            batch = make_batch(step * rank.world + rank.rank)
            optimizer.zero_grad()
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            rank.stepped(step, time.perf_counter() - began)

    os.environ.pop("LOCAL_RANK", None)  # with it, it looks for GPUs before it goes on, and ends
    # Its wrapper finds the parameter that it fills in by this annotation.
    train.__annotations__["call_wrapper"] = inprocess.CallWrapper
    assignment = inprocess.rank_assignment
    inprocess.Wrapper(
        rank_assignment=inprocess.Compose(
            assignment.MaxActiveWorldSize(int(os.environ["WORLD_SIZE"]) - 1),
            assignment.ShiftRanks(),  # this one first
        ),
        monitor_thread_interval=QUICK,
        monitor_process_interval=QUICK,
        heartbeat_interval=QUICK,
        progress_watchdog_interval=QUICK,
        soft_timeout=HANG - QUICK,  # must be shorter
        hard_timeout=HANG,
        termination_grace_time=LAST_CALL,
        last_call_wait=LAST_CALL,
    )(train)()


if __name__ == "__main__":
    main()
