"""Our Checkpointer, with the Store of a ``bench.checkpoint.node``, as two ways to save."""

from __future__ import annotations

import os
from pathlib import Path

from bench.checkpoint.saving.savers import Saver
from bench.checkpoint.work import Work
from robust_slurm import Checkpointer

SOCKET = "ROBUST_CKPT_SOCKET"


class Own(Saver):
    """``directory`` is not used: the files are the Store's. Nothing is left to settle after the
    next step, before whose optimizer it waits for copy, digest and replica."""

    note = "robust_slurm.Checkpointer, Store in its own process, no peer"

    def __init__(self, work: Work, directory: Path) -> None:
        super().__init__(work, directory)
        if SOCKET not in os.environ:
            raise RuntimeError(f"{SOCKET} is not set: start this through bench.checkpoint")
        world = int(os.environ.get("WORLD_SIZE", "1"))
        # Pipeline stages: every rank has a state of its own, and its replica on another node.
        self._checkpointer = Checkpointer(
            model=work.model, optimizer=work.optimizer, mesh={"pp": world}
        )
        self._checkpointer.resume()
        self._seen = (0, 0.0)

    def save(self, step: int) -> None:
        self._checkpointer.save(step)

    def close(self) -> None:
        self._checkpointer.close()

    def extra(self) -> dict[str, float]:
        self._check_torn()
        stats = self._checkpointer.stats
        count, seconds = stats.snapshots - self._seen[0], stats.copy_s - self._seen[1]
        self._seen = (stats.snapshots, stats.copy_s)
        if not count:
            raise RuntimeError("nothing was saved: see the messages above")
        return {"copy_s": seconds / count}

    def _check_torn(self) -> None:
        if torn := self._checkpointer.stats.torn:
            raise RuntimeError(f"{torn} snapshots were torn: what was measured is no saving")


class OwnReplica(Own):
    """The node has been told to replicate."""

    note = "robust_slurm.Checkpointer, Store in its own process, replica on a second node's Store"


class OwnJob(Own):
    """Started by robust-srun."""

    note = (
        "robust_slurm.Checkpointer under robust-srun, 2 nodes of 1 rank, replica on the other node"
    )

    def extra(self) -> dict[str, float]:
        """Check that nothing was torn; not every step need be saved (``checkpoint_overhead``)."""
        self._check_torn()
        return {}

    def close(self) -> None:
        super().close()
        stats = self._checkpointer.stats
        self.taken = f"{stats.snapshots} of all {stats.saves - 1} calls of save() but the last"
