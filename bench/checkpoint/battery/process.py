"""Runs the battery's loops in forks of this process, which has imported everything.

At its start it prints all kinds as one line of JSON. Each line on stdin is an order: a variant, a
mode, a number of ranks, where their results go, and the store's socket or none. Each is answered
with the exit codes of the ranks (minus the signal; None: it hung).
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.checkpoint.battery import case, kinds
from bench.checkpoint.battery.frame import KINDS, RefusedError, Run, digest
from bench.checkpoint.battery.writing import write_in_thread

TOGETHER = 1.0
"""s that the other ranks have to crash by themselves."""


def import_kinds(families: list[str]) -> None:
    """Import the modules of kinds; ``families``: only these, if there are any."""
    for module in pkgutil.iter_modules(kinds.__path__):
        if not families or module.name in families:
            importlib.import_module(f"{kinds.__name__}.{module.name}")


def run_rank(order: dict[str, Any], rank: int) -> None:
    """Run one rank's loop, and leave its result in a file."""
    variant, world = case.decode(order["variant"]), int(order["world"])
    directory = Path(order["directory"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    if order["socket"]:
        os.environ |= {"ROBUST_CKPT_SOCKET": order["socket"], "ROBUST_EPOCH": str(order["epoch"])}
    if variant.kind.family == "ranks":
        rendezvous = f"file://{order['scratch']}/rendezvous-{order['mode']}"
        dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
    run = Run(variant, order["mode"], directory, rank, world)
    _, train = KINDS[variant.kind.name]
    try:
        state = train(run)
        run.result["state"] = state if isinstance(state, dict) else digest(state)
    except RefusedError as error:
        run.result |= {"error": str(error), "refused": True, "trace": traceback.format_exc()}
    except BaseException as error:  # noqa: BLE001 - the parent's code must not go on here
        text = f"{type(error).__name__}: {error}"
        run.result |= {"error": text, "refused": False, "trace": traceback.format_exc()}
    Path(f"{order['scratch']}/result-{rank}").write_text(json.dumps(run.result))


def _seed(seed: int) -> None:
    """Seed all: a script's own seeds are the same in each run, what it leaves unseeded is not."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _in_fork(order: dict[str, Any], rank: int) -> None:
    logging.disable(logging.WARNING)
    err = os.open(f"{order['scratch']}/err-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(err, 2)
    os.dup2(err, 1)
    signal.alarm(int(order["deadline"]))
    warnings.simplefilter("ignore")
    try:
        write_in_thread()
        _seed(int(order["mode"] == "resume"))
        run_rank(order, rank)
        sys.stderr.flush()
    finally:
        os._exit(0)


def run_order(order: dict[str, Any]) -> list[int | None]:
    """Fork the ranks of an order and wait for them. Once one is killed, so are the others."""
    pids = {}
    for rank in range(int(order["world"])):
        pids[rank] = pid = os.fork()
        if not pid:
            _in_fork(order, rank)
    codes: dict[int, int | None] = {}
    end = float("inf")
    while len(codes) < len(pids):
        for rank, pid in pids.items():
            if rank not in codes:
                done, status = os.waitpid(pid, 0 if len(pids) == 1 else os.WNOHANG)
                if done:
                    code = os.waitstatus_to_exitcode(status)
                    codes[rank] = None if code == -signal.SIGALRM else code
                    if code < 0:
                        end = min(end, time.monotonic() + TOGETHER)
        if time.monotonic() > end:
            for rank, pid in pids.items():
                if rank not in codes:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002 if len(pids) > 1 else 0)
    return [codes[rank] for rank in sorted(pids)]


def main(families: list[str]) -> None:
    """Serve orders until stdin ends."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import_kinds(families)
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.compile(torch.optim.SGD([parameter]).step, backend="eager")()  # imports for 2 s
    print(json.dumps([asdict(kind) for kind, _ in KINDS.values()]), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(run_order(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
