"""One training process of bench.checkpoint: steps with and without saving, in turn; prints JSON.

``python -m bench.checkpoint.saving.driver SAVER BYTES PAIRS THREADS DIRECTORY``

A block of steps that save is followed by one of steps that do not, the next pair the other way
round. The first step of a block is not counted: what the block before left in the background ends
there.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from bench.checkpoint.job import leave
from bench.checkpoint.saving.savers import Saver
from bench.checkpoint.work import COPIES_PER_STEP, Memcpy, Work

SAVERS = {
    "save": "bench.checkpoint.saving.own:Own",
    "save_replica": "bench.checkpoint.saving.own:OwnReplica",
    "job": "bench.checkpoint.saving.own:OwnJob",
    "torch_save": "bench.checkpoint.saving.savers:TorchSave",
    "dcp_async": "bench.checkpoint.saving.savers:DcpAsync",
    "dlrover": "bench.checkpoint.saving.savers:DLRover",
    "nvrx": "bench.checkpoint.saving.nvrx:NvrxSync",
    "nvrx_async": "bench.checkpoint.saving.nvrx:NvrxAsync",
}
BLOCK = 2
WARM_UP = 5
"""Saves before anything is timed: every buffer has been used then."""


class Loop:
    """The training loop, and what a saver costs in it."""

    def __init__(self, work: Work, saver: type[Saver], directory: Path) -> None:
        self._work = work
        self._at = 0
        self._entered = self._waited = 0.0
        # Hooks run in the order of their registration, global ones first: between these two is
        # all that makes the optimizer wait.
        register_optimizer_step_pre_hook(self._enter)
        self.saver = saver(work, directory)
        work.optimizer.register_step_pre_hook(lambda *_: self.saver.before_step())
        work.optimizer.register_step_pre_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self._entered = time.perf_counter()

    def _leave(self, *_: Any) -> None:
        self._waited = time.perf_counter() - self._entered

    def block(self, saves: bool, steps: int) -> list[tuple[float, float, float]]:
        """Seconds of each step, of save() in it, and of waiting before the optimizer in it."""
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # all ranks save, or none
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            self._work.step()
            self._at += 1
            done = time.perf_counter()
            if saves:
                self.saver.save(self._at)
            ended = time.perf_counter()
            found.append((ended - began, ended - done, self._waited))
        if saves:
            self.saver.settle()
        return found


def measure(loop: Loop, memcpy: Memcpy, pairs: int) -> dict[str, Any]:
    """Samples by what they are of; ``paired``: step time with saving over that without."""
    found: dict[str, Any] = {key: [] for key in ("blocked", "with", "without", "paired", "memcpy")}
    found["extra"] = {}
    for pair in range(pairs):
        took = {}
        for saves in (True, False) if pair % 2 else (False, True):
            steps = loop.block(saves, BLOCK)[1:]
            took[saves] = sum(one[0] for one in steps) / len(steps)
            found["with" if saves else "without"] += [one[0] for one in steps]
            if saves:
                found["blocked"] += [one[1] + one[2] for one in steps]
                for key, value in loop.saver.extra().items():
                    found["extra"].setdefault(key, []).append(value)
            else:
                found["memcpy"] += [memcpy.seconds() for _ in steps]
        found["paired"].append(took[True] / took[False])
    return found


def main(argv: list[str]) -> None:
    name, size, pairs, threads, directory = argv
    quiet()
    torch.set_num_threads(int(threads))
    module, _, attribute = SAVERS[name].partition(":")
    saver = getattr(importlib.import_module(module), attribute)
    rank = int(os.environ["SLURM_PROCID"]) if name == "job" else 0
    if name == "job":
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(rank), os.environ["SLURM_NTASKS"]
        torch.distributed.init_process_group("gloo")
    work = Work(int(size))
    work.step()
    memcpy = Memcpy(work.nbytes)
    work.calibrate(COPIES_PER_STEP * min(memcpy.seconds() for _ in range(5)))
    loop = Loop(work, saver, Path(directory))
    loop.block(True, WARM_UP)
    found = measure(loop, memcpy, int(pairs))
    loop.saver.close()
    found |= {"nbytes": work.nbytes, "tensors": len(work.tensors()), "note": saver.note}
    if name == "job":
        found["taken"] = loop.saver.taken
        leave(directory, rank, found)
        torch.distributed.barrier()  # the first to leave would end the step of the other
    else:
        print(json.dumps(found))


def quiet() -> None:
    """Peers log every save; only errors are wanted."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main(sys.argv[1:])
