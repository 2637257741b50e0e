"""Requeue the job on a signal, as the user asked, once the snapshots in memory are on disk.

Slurm sends the signal before the time limit (``sbatch --signal=USR2@120``), or at the beginning of
a preemption. The ranks get it from Slurm, too, and end as they would under srun.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from robust_slurm.slurm import Job
from srun_wrapper.checkpoints import flushing
from srun_wrapper.checkpoints.flushing import Flushing
from srun_wrapper.command.kinds import requeue_signals
from srun_wrapper.job.model import Role
from srun_wrapper.job.reporting.phase import Phase
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.orders.stopping import Stopping
from srun_wrapper.recover.last_rung import LastRung

UNKNOWN = 60.0  # s that a job is taken to have left if Slurm does not say
TO_END = 0.5  # of the time left, for the ranks to end by themselves
MOST = 600.0  # s for that
NO_LOOP = 60.0  # s: a run that was shorter and made no step would be requeued for ever


class SignalledRequeue:
    """Requeues a running job after a signal of ``requeue_on``."""

    def __init__(
        self,
        state: JobState,
        stopping: Stopping,
        last_flush: Flushing,
        last_rung: LastRung,
        phase: Phase,
    ) -> None:
        self._state = state
        self._signals = requeue_signals(state.config.requeue_on)
        self._stopping = stopping
        self._flushing = last_flush
        self._last_rung = last_rung
        self._phase = phase
        self._began = time.monotonic()
        self._refused: dict[int, float] = {}  # when

    @property
    def asked(self) -> int:
        """The signal that asks for a requeue; 0: none has come, or it was refused."""
        came = {self._state.signalled: 0.0, **self._state.passed_on}
        return min(
            (n for n, at in came.items() if n in self._signals and at > self._refused.get(n, -1.0)),
            default=0,
        )

    async def requeue(self, ended: Callable[[], bool]) -> bool:
        """Have the ranks end, write their last step to disk, and requeue the job.

        ``ended``: True once the job's step is over. False: the job is not requeued, and goes on or
        ends as if nobody had asked for it.
        """
        number = self.asked
        job = await self._last_rung.read_job()
        if why := self._why_not(job, ended()):
            return self._refuse(number, why)
        left = _left(job)
        await self._end_ranks(min(MOST, TO_END * left), ended)
        await self._flushing.flush(min(flushing.END, flushing.OF_KILL_WAIT * _left(job)))
        why = self._why_not(await self._last_rung.read_job(), ended())
        if why or (why := await self._last_rung.requeue(standby=False)):
            return self._refuse(number, why)
        self._phase.name = "requeued"
        say(f"{signal.Signals(number).name}: the job is requeued")
        return True

    def _refuse(self, number: int, why: str) -> bool:
        self._refused[number] = time.monotonic()
        say(f"{signal.Signals(number).name}: the job is not requeued: {why}")
        return False

    async def _end_ranks(self, limit: float, ended: Callable[[], bool]) -> None:
        """Wait for ranks that end by the signal; those that do not in ``limit`` s are ended."""
        state = self._state

        def over() -> bool:
            return state.world.all_exited() or state.stopped() or ended()

        if not await state.until(over, limit):
            state.members.stop_epoch()
            running = [n for n in state.world.places if n.role is Role.ACTIVE]
            await self._stopping.end_ranks(running, ended)

    def _why_not(self, job: Job | None, ended: bool) -> str:
        """Return what speaks against a requeue; "": nothing."""
        if ended:
            return "Slurm has ended its step"
        lived = time.monotonic() - self._began
        if lived < NO_LOOP and not self._state.progress.stepped:
            return f"it made no step in {lived:.0f} s, and would be requeued again and again"
        if job is None:
            return ""  # the request itself outlasts an absence of Slurm
        if not job.batch:
            return "only batch jobs (sbatch) can be requeued"
        if job.restarts > self._state.restarts or job.state == "PENDING":
            return "it is in the queue already"  # by the script itself, or by a preemption
        if not job.running:
            return (
                f"Slurm has ended it ({job.reason or job.state}); sbatch --signal=USR2@120 has "
                "Slurm send a signal 120 s before the time limit"
            )
        return ""


def _left(job: Job | None) -> float:
    """Return the seconds that the job has left."""
    if job is None or job.end_time is None:
        return UNKNOWN
    return max(1.0, job.end_time - time.time())
