"""Parts of all trainings of the checkpoint tests: options, journal, data, faults on command.

A training writes, for each rank, the lines of ``<dir>/rank-<rank>.jsonl``: ``resumed`` (a step)
once in each process; ``step``, ``loss``, ``ids``, ``state`` and ``at`` (s since 1970) when a step
is done and not yet saved; ``saved`` (a step) after that; ``end`` when all is closed. Losses are
written as float.hex(), ``state`` is a checksum over what the next step depends on: but for ``at``,
equal lines mean equal bits. ``run`` is the job and how often it was requeued, ``epoch``
robust-srun's in it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
import without_compiler
from teardown import leave
from torch import Tensor, nn
from torch.utils.data import Dataset, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import robust_slurm

SAMPLES = 24  # of the data set: with 2 readers and batches of 3, four steps read it once
BATCH = 3  # samples of a reader and step
WIDTH = 8  # numbers of a sample
warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata's
without_compiler.install()

HOLD = 300.0  # s that a rank stays where it is held, for the test to make a fault


def options(*own: str) -> argparse.Namespace:
    """The command line; ``own``: names of more options that the program has."""
    parser = argparse.ArgumentParser()
    for name in own:
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds of sleep in each step")
    parser.add_argument("--kill", default="", help="EPOCH:STEP:RANK,… that die amid that step")
    parser.add_argument("--hold", default="", help="EPOCH:STEP,… at whose beginning all ranks stay")
    parser.add_argument("--ballast", type=int, default=0, help="more parameters, bytes per rank")
    parser.add_argument("--directory", help="of the durable checkpoints")
    parser.add_argument("--every", type=int, help="steps between the durable checkpoints")
    parser.add_argument("--apart", action="store_true", help="each rank saves all of its own")
    parser.add_argument("--bare", action="store_true", help="without a Checkpointer")
    return parser.parse_args()


def join_world() -> tuple[int, int]:
    """Join the process group; rank and world size, as robust-srun, torchrun or srun set them."""
    env = os.environ
    rank = int(env.get("RANK") or env.get("SLURM_PROCID") or 0)
    world = int(env.get("WORLD_SIZE") or env.get("SLURM_NTASKS") or 1)
    torch.set_num_threads(1)
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms needs the compiler
    if world == 1:
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, world


def seed(value: int) -> None:
    """Every generator that a training may draw from."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


# -- the data ---------------------------------------------------------------------------------


class Samples(Dataset[tuple[int, Tensor, Tensor]]):
    """Sample i: its number, its input (WIDTH), its target (1)."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(1000 + i))
        return i, x, x.sin().sum().reshape(1)


class Counter:
    """A number with a state: how often the data were read through."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.value = state["value"]


class Reader:
    """Endless batches for one of several readers; each pass is in an order of its own."""

    def __init__(self, reader: int, readers: int) -> None:
        data = Samples()
        self._sampler = DistributedSampler(data, num_replicas=readers, rank=reader, seed=5)
        self.loader = StatefulDataLoader(data, batch_size=BATCH, sampler=self._sampler)
        self.passes = Counter()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        while True:
            self._sampler.set_epoch(self.passes.value)
            yield from self.loader
            self.passes.value += 1


# -- the journal ------------------------------------------------------------------------------


class Journal:
    """This rank's lines, each written whole before the next thing happens."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        env = os.environ
        self.epoch = int(env.get("ROBUST_EPOCH", "1"))
        self._run = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_RESTART_COUNT', '0')}"
        self._file = (args.dir / f"rank-{rank}.jsonl").open("ab", buffering=0)

    def write(self, **line: Any) -> None:
        text = json.dumps({"run": self._run, "epoch": self.epoch, **line})
        self._file.write(text.encode() + b"\n")


def fingerprint(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Digest this rank's parameters, buffers, optimizer state and torch's generators."""
    total = 0
    tensors = [each for each in model.state_dict().values() if isinstance(each, Tensor)]
    for state in optimizer.state_dict()["state"].values():
        tensors += [value for _, value in sorted(state.items()) if isinstance(value, Tensor)]
    generators = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.get_rng_state())
    for tensor in [*tensors, *generators]:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        data = local.detach().cpu().reshape(-1).view(torch.uint8)
        total = zlib.crc32(data.numpy().tobytes(), total)
    return f"{total:08x}"


# -- saving, and what a test makes of a step -----------------------------------------------------


class Training:
    """The loop around a step: resume, save, journal, and the faults that the options ask for."""

    def __init__(
        self,
        args: argparse.Namespace,
        rank: int,
        reader: Reader,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra: Mapping[str, Any],
        mesh: Any = None,
    ) -> None:
        self._args, self._rank, self._reader = args, rank, reader
        self._model, self._optimizer = model, optimizer
        self._journal = Journal(args, rank)
        self._kills = [tuple(map(int, k.split(":"))) for k in filter(None, args.kill.split(","))]
        self._holds = [tuple(map(int, h.split(":"))) for h in filter(None, args.hold.split(","))]
        self._checkpointer: Any = None
        if not args.bare:
            self._checkpointer = robust_slurm.Checkpointer(
                model=model,
                optimizer=optimizer,
                loader=reader.loader,
                extra={"passes": reader.passes, **extra},
                mesh=mesh,
                directory=args.directory,
                every=args.every,
            )

    def steps(self) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Resume; then each step that is left, as it begins, and its batch."""
        step = self._resume()
        batches = iter(self._reader)
        while step < self._args.steps:
            step += 1
            self._begin(step)
            yield step, *next(batches)

    def _resume(self) -> int:
        step = 0 if self._checkpointer is None else int(self._checkpointer.resume())
        self._journal.write(resumed=step, state=fingerprint(self._model, self._optimizer))
        return step

    def _begin(self, step: int) -> None:
        """A step begins: stay here if the test wants that, once for all runs of the job."""
        time.sleep(self._args.pause)
        held = self._args.dir / f"held.{self._journal.epoch}.{step}.{self._rank}"
        if (self._journal.epoch, step) in self._holds and not held.exists():
            held.touch()
            time.sleep(HOLD)
            raise SystemExit(f"rank {self._rank}: nothing happened in step {step}")

    def amid(self, step: int) -> None:
        """After optimizer.step(), which waits for the copy of the step before: die here if the
        test wants that."""
        if (self._journal.epoch, step, self._rank) in self._kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def done(self, step: int, loss: float, ids: Tensor) -> None:
        state = fingerprint(self._model, self._optimizer)
        self._journal.write(
            step=step, loss=loss.hex(), ids=ids.tolist(), state=state, at=time.time()
        )
        if self._checkpointer is not None:
            self._checkpointer.save(step)
        self._journal.write(saved=step)

    def close(self) -> NoReturn:
        """The program ends here."""
        stats = {}
        if self._checkpointer is not None:
            self._checkpointer.close()
            stats = {"stats": repr(self._checkpointer.stats)}
        self._journal.write(end=True, **stats)
        dist.barrier()
        dist.destroy_process_group()
        leave()


class Ballast(nn.Module):
    """Parameters that only take room; every step changes them."""

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(max(1, nbytes // 4)))

    def forward(self, x: Tensor) -> Tensor:
        """x plus almost nothing, so that the gradient is not zero."""
        return x + 1e-6 * self.weight.mean()
