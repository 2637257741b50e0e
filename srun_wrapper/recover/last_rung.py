"""The ladder's last rung: the job goes back to the queue without its bad nodes."""

from __future__ import annotations

import contextlib

from robust_slurm.slurm import Job, SlurmError
from robust_slurm.state_dir.ledger import JobLedger
from srun_wrapper.agent.batch_host_failover import claim
from srun_wrapper.command import steps
from srun_wrapper.job.reporting.report import say
from srun_wrapper.job.state import JobState
from srun_wrapper.recover.reports import Reports
from srun_wrapper.requeue.requeue import put_back
from srun_wrapper.requeue.slurm_wait import Controller
from srun_wrapper.run_in_thread import run_in_thread

CLAIM = 10.0  # s for the state directory to answer before a requeue
LOOK = 5.0  # s for Slurm to show the job


class LastRung:
    """Requeues the job, unless the nodes that have lost this one bring it back."""

    def __init__(
        self,
        state: JobState,
        launch: steps.Launch,
        controller: Controller,
        reports: Reports,
        ledger: JobLedger,
    ) -> None:
        self._job_id = state.job_id
        self._restarts = state.restarts
        self._config = state.config
        self._launch = launch
        self._slurm, self._wait = controller
        self._reports = reports
        self._ledger = ledger
        self._claimed = False
        self.excluded: tuple[str, ...] = ()  # nodes that the job excludes from its requeue on

    async def read_job(self) -> Job | None:
        """Return the job as Slurm has it now; None: Slurm does not answer."""
        try:
            return await run_in_thread(lambda: self._slurm.job(self._job_id), LOOK)
        except (SlurmError, TimeoutError):
            return None

    async def requeue(self, *, standby: bool = True) -> str:
        """Put the job back in the queue; returns why not, or ''.

        ``standby``: it may start on standby nodes, which are there for lost ones.
        """
        self._reports.report_silent()
        if not await self._claim():
            return "the other nodes restart the job because they have lost this one"
        try:
            job, self.excluded = await self._wait.call(
                "put the job back in the queue",
                lambda: put_back(
                    self._slurm,
                    self._job_id,
                    self._reports.evidence(),
                    self._config.standby_partition if standby else "",
                    self._launch.options.size,
                    self._restarts,
                    self._reports.not_bad(),
                    say,
                ),
                whole=True,
            )
        except SlurmError as err:
            await self._unclaim()
            return f"cannot requeue: {err}"
        if job != self._job_id:
            say(f"Slurm cannot requeue job {self._job_id} again: it continues as job {job}")
        return ""

    async def _claim(self) -> bool:
        """See ``batch_host_failover.claim``; a file system that is silent cannot be asked."""
        directory = self._ledger.dir
        try:
            self._claimed = await run_in_thread(lambda: claim(directory, self._restarts), CLAIM)
            return self._claimed
        except TimeoutError:
            self._claimed = False  # it may be another's
            say(f"{directory} does not answer in {CLAIM:g} s: requeueing without its records")
            return True

    async def _unclaim(self) -> None:
        """Let a later request, or the nodes that lose this one, bring the job back."""
        if self._ledger.dir is not None and self._claimed:
            path = self._ledger.dir / f"rescued.{self._restarts}"
            with contextlib.suppress(OSError, TimeoutError):
                await run_in_thread(lambda: path.unlink(missing_ok=True), CLAIM)
