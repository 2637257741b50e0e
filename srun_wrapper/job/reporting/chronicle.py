"""The job's progress over time, for reports: ``progress.jsonl`` in the job's record directory.

The file grows with the logarithm of the job's age: points lie a second apart at first, later a
500th of the time that the job has run. 90 days of points are about 400 KB.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.job.reporting.report import Account
from srun_wrapper.job.state import JobState

SHORTEST = 1.0  # s between two points
SHARE = 500.0  # of the time that the job has run


class Chronicle:
    """Writes when the run began, made its first step and ended, its worlds, and its points."""

    def __init__(
        self, state: JobState, ledger: JobLedger, account: Account, env: Mapping[str, str]
    ) -> None:
        self._state = state
        self._ledger = ledger
        self._account = account
        self._env = env
        self._begun = False
        self._launched = self._first = False
        self._next = 0.0
        self._places: dict[int, str] = {}

    def world(self) -> None:
        """Write the places that changed with a new epoch; with the first one, that the run began.

        Each node's ranks are written as text: ``n1 0-7``.
        """
        if not self._begun:
            self._begun = True
            gpus = self._gpus()
            partition = self._env.get("SLURM_JOB_PARTITION", "")
            self._put("run", self._account.wall, gpus=gpus, partition=partition)
        world = self._state.world
        now = {
            place: f"{node.name} {_span(ranks)}"
            for place, (node, ranks) in enumerate(zip(world.places, world.ranks, strict=True))
        }
        changed = {str(p): text for p, text in now.items() if self._places.get(p) != text}
        self._places = now
        trains = {"trains": world.resized[1], "of": world.resized[0]} if world.resized else {}
        self._put(
            "world", time.time(), epoch=world.epoch, ranks=world.size, places=changed, **trains
        )

    def look(self, now: float) -> None:
        """Write a point when the next one is due; ``now``: monotonic seconds."""
        account = self._account
        if not self._launched and account.launched is not None:
            self._launched = True
            self._put("launched", time.time() - (now - account.launched))
        if not self._first and account.first_step is not None:
            self._first = True
            self._put("first", time.time() - (now - account.first_step))
        if self._first and now >= self._next:
            self._next = now + max(SHORTEST, (now - account.started) / SHARE)
            self._point()

    def end(self, state: str) -> None:
        """Write the run's last word."""
        if self._begun:
            self._put("end", time.time(), state=state)

    def _point(self) -> None:
        state = self._state
        if state.stopped() or not state.progress.beats:
            return  # the last pace and loss are of the incarnation before
        seconds, loss = state.pace.step_time(), self._loss()
        self._put(
            "point",
            time.time(),
            step=state.progress.best,
            epoch=state.world.epoch,
            s=None if seconds is None else float(f"{seconds:.4g}"),
            loss=None if loss is None else float(f"{loss:.6g}"),
        )

    def _loss(self) -> float | None:
        """The loss of the first rank that reports a finite one."""
        for rank in self._state.world.running():
            if rank.loss is not None and rank.loss - rank.loss == 0.0:
                return rank.loss
        return None

    def _gpus(self) -> int | None:
        """GPUs of the nodes that train; None where Slurm names none."""
        each = self._env.get("SLURM_GPUS_ON_NODE", "")
        if not (each.isascii() and each.isdigit()) or len(each) > 4:
            return None
        return int(each) * len(self._state.world.places)

    def _put(self, kind: str, when: float, **fields: object) -> None:
        step = self._state.step_id
        self._ledger.progress({"kind": kind, "time": round(when, 3), "step_id": step, **fields})


def _span(ranks: tuple[int, ...]) -> str:
    """Like "0-7", or "0,4,9" for ranks that are no range."""
    if len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks))
