"""Before the job leaves its nodes: write what only memory has to the durable tier."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from robust_slurm.checkpoint.planning.flush import flush as plan_flush
from robust_slurm.checkpoint.planning.sound import only_sound
from srun_wrapper.checkpoints.certificates import Certificates
from srun_wrapper.checkpoints.enrolments import Enrolments
from srun_wrapper.checkpoints.on_disk import committed, only, replaced
from srun_wrapper.checkpoints.stores import Stores
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState

END = 600.0  # s for the last durable checkpoint of a job that ends by itself
SIGNALLED = 20.0  # s for one that is ended, and at most
OF_KILL_WAIT = 0.7  # of the time that Slurm gives it
ASK = 2.0  # s for Slurm to say how long that is


class Flushing:
    """Flushes memory to disk. ``ended``: True once the job's step is over."""

    def __init__(
        self,
        state: JobState,
        enrolments: Enrolments,
        certificates: Certificates,
        stores: Stores,
        ended: Callable[[], bool],
    ) -> None:
        self._state = state
        self._enrolments = enrolments
        self._certificates = certificates
        self._stores = stores
        self._ended = ended

    @property
    def needed(self) -> bool:
        """True if there may be something to flush."""
        return bool(self._enrolments.ranks and self._enrolments.directory) and not self._ended()

    async def flush(self, limit: float) -> None:
        """Write the newest step that memory has whole to disk, if disk has none as new."""
        try:
            await self._flush(limit)
        except Exception as err:  # noqa: BLE001 - a slip here must not change how the job ends
            text = f"{type(err).__name__}: {err}"
            say(f"checkpoints: internal error; the last step may not be on disk: {text}")

    async def _flush(self, limit: float) -> None:
        if not self.needed:
            return
        until = time.monotonic() + limit
        signalled = self._state.signalled
        directory = self._enrolments.directory
        present = self._enrolments.world or self._state.world.size
        worlds = [present, *(each.size for each in self._enrolments.earlier)]
        # The writer holds every byte against its digest before it writes it.
        places, on_disk = await asyncio.gather(
            self._stores.stock(self._ended),
            committed(directory, self._state.config.checkpoint_list_limit),
        )
        trust = self._certificates.trust(places, on_disk)
        certified = bool(trust.why and (trust.memory or trust.disk))  # it alone may come last
        before = self._certificates.bound()
        last = before.step if trust.why and before is not None else math.inf  # later: in doubt
        kept = [
            c
            for c in on_disk
            if not c.mark.doubt and (c.step in trust.disk if certified else c.step <= last)
        ]
        steps = [(c.step, c.world) for c in kept]
        if certified:
            places = only(places, trust.memory)
        plans = [(plan_flush(only_sound(places, before), size, steps), size) for size in worlds]
        flush, world = max(plans, key=lambda one: (bool(one[0].writes), one[0].step))
        if flush.writes and limit > SIGNALLED:  # time to see which copies are good
            checked = await self._stores.stock(self._ended, flush.step)
            places = replaced(places, flush.step, checked)
            if certified:
                places = only(places, trust.memory)
            flush = plan_flush(only_sound(places, before), world, steps)
        newest = max((c.step for c in kept), default=0)
        if flush.writes:
            left = max(1.0, until - time.monotonic())
            files: dict[str, list[tuple[int, str]]] = {}
            for write in flush.writes:
                files.setdefault(write.store, []).append((write.owner, write.file))
            committer = (flush.committer, world)
            limits = [(lambda: self._state.signalled != signalled, SIGNALLED)]
            why = await self._stores.flush(flush.step, files, committer, left, self._ended, limits)
            if why:
                say(f"checkpoints: step {flush.step} was not written to disk: {why}")
            else:
                newest = flush.step
                say(f"checkpoints: step {flush.step} is on disk in {directory}")
                await self._certificates.mark(flush.step)
        if certified or (newest and last < math.inf):
            await self._certificates.doubt(on_disk, newest, trust.why)
