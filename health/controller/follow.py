"""Follows one job from its end until it is over, or pending again, and starts it then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from health.controller.decide import StartDecision, completing, decide, waits
from robust_slurm.slurm import Job, SlurmError
from robust_slurm.state_dir.requeue_plan import RequeuePlan

LOOK_S = (0.3, 0.3, 0.5, 0.5, 1.0)  # pauses between looks; the last one repeats


class SlurmDoor(Protocol):
    """The part of the door to Slurm that is used here."""

    def job(self, job_id: int | str) -> Job: ...
    def config(self) -> dict[str, str]: ...
    def update_job(self, job_id: int | str, *, start_time: float) -> None: ...


class JobFollower:
    """One job; ``until``: monotonic seconds at which it is left to Slurm."""

    def __init__(
        self,
        door: SlurmDoor,
        name: str,
        uid: int,
        until: float,
        pause: Callable[[float], None] = time.sleep,
        ran_s: float | None = None,
    ) -> None:
        """``name``: as Slurm's commands take it; ``ran_s``: of its last run, if that is known."""
        self._door, self._name, self._uid = door, name, uid
        self._until, self._pause = until, pause
        self._looks = 0
        self.ran_s = ran_s

    def read_job(self) -> Job | None:
        """Return the job; None: Slurm does not know it any more, or it is another's.

        Raises SlurmError.
        """
        try:
            job = self._door.job(self._name)
        except SlurmError as error:
            if error.kind == "not_found":
                return None
            raise
        if job.uid != self._uid:
            return None
        if self.ran_s is None and completing(job) and job.start_time is not None:
            self.ran_s = (job.end_time or time.time()) - job.start_time
        return job

    def rest(self) -> bool:
        """Wait for the next look; False: the time is over."""
        pause = LOOK_S[min(self._looks, len(LOOK_S) - 1)]
        self._looks += 1
        if time.monotonic() + pause >= self._until:
            return False
        self._pause(pause)
        return True

    def ended(self) -> Job | None:
        """Wait until the job's old run is over. Raises SlurmError."""
        job = self.read_job()
        while job is not None and completing(job):
            if not self.rest():
                return None
            job = self.read_job()
        return job

    def start(self, plan: Callable[[], RequeuePlan | None]) -> StartDecision:
        """Start the job once its old run is over, if it is to start at all. Raises SlurmError.

        ``plan`` reads the plan of its requeue; it is called only when the job is pending again.
        """
        delays: set[int] | None = None
        while True:
            job = self.read_job()
            if job is None:
                return StartDecision("leave", "Slurm does not know it any more")
            found = StartDecision("wait", "its old run is not over")
            if not completing(job):
                delays = waits(self._door.config()) if delays is None else delays
                try:
                    wanted = plan()
                except (OSError, ValueError) as error:
                    return StartDecision("leave", f"its plan cannot be read: {error}")
                found = decide(job, wanted, delays, self.ran_s, time.time())
            if found.step == "start":
                self._door.update_job(self._name, start_time=float(found.at))
            if found.step != "wait":
                return found
            if not self.rest():
                return found._replace(step="leave")
