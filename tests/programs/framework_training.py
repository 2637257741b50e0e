"""Parts of all trainings of the framework tests; the journal is that of ``ckpt_training``.

The framework calls ``Checkpointer``, not the program: ``journal_of`` writes the lines ``resumed``
and ``saved`` from inside it.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

from ckpt_training import HOLD, Journal, fingerprint
from torch import Tensor, nn

import robust_slurm


class Steps:
    """The journal of a rank, and what a test makes of a step."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self._args, self._rank = args, rank
        self._kills = [tuple(map(int, k.split(":"))) for k in filter(None, args.kill.split(","))]
        self._holds = [tuple(map(int, h.split(":"))) for h in filter(None, args.hold.split(","))]
        self.model: Any = None
        self.optimizer: Any = None
        self.journal = Journal(args, rank)
        resume, save = robust_slurm.Checkpointer.resume, robust_slurm.Checkpointer.save

        def resumed(checkpointer: Any) -> int:
            step = resume(checkpointer)
            self.journal.write(resumed=step)
            return step

        def saved(checkpointer: Any, step: Any) -> None:
            save(checkpointer, step)
            self.journal.write(saved=step)
            self.amid(-int(step))
            self.hold(int(step) + 1)

        robust_slurm.Checkpointer.resume = resumed  # type: ignore[method-assign]
        robust_slurm.Checkpointer.save = saved  # type: ignore[method-assign]

    def hold(self, step: int) -> None:
        """Stay at the beginning of this step if the test wants that."""
        time.sleep(self._args.pause)
        if (self.journal.epoch, step) in self._holds:
            (self._args.dir / f"held.{self.journal.epoch}.{step}.{self._rank}").touch()
            time.sleep(HOLD)
            raise SystemExit(f"rank {self._rank}: nothing happened in step {step}")

    def amid(self, step: int) -> None:
        """Die if the test wants that; -3: after step 3 is saved, and before anything else."""
        if step < 0 and (self.journal.epoch, step, self._rank) in self._kills:
            wait_for_manifest(self._args.directory, -step)
        if (self.journal.epoch, step, self._rank) in self._kills:
            os.kill(os.getpid(), signal.SIGKILL)

    def done(
        self, step: int, loss: float, ids: list[int], model: nn.Module, optimizer: Any
    ) -> None:
        state = fingerprint(model, optimizer)
        self.journal.write(step=step, loss=loss.hex(), ids=ids, state=state)

    def end(self, **line: Any) -> None:
        self.journal.write(end=True, **line)


def wait_for_manifest(directory: str, step: int) -> None:
    """Wait until a step is on disk."""
    deadline = time.monotonic() + 60
    while not (Path(directory) / f"step-{step:08d}" / "manifest.json").exists():
        assert time.monotonic() < deadline, f"step {step} is not on disk"
        time.sleep(0.02)


def whole(values: list[Tensor]) -> list[int]:
    return [int(i) for part in values for i in part.tolist()]
