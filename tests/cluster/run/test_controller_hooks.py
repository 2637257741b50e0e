"""The controller hooks, run by a real slurmctld without nodes: requeues, and directories."""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import until

from bench.controller import install
from health.admin import controller
from health.controller.records import USED
from lab.slurm.controller import Controller
from robust_slurm.slurm import Job, Slurm
from robust_slurm.state_dir.ledger import replace_file
from robust_slurm.state_dir.requeue_plan import NAME, RequeuePlan

SOON = 15.0  # s; Slurm's own delay is 121 s
USER = pwd.getpwnam("nobody")


class HookedSlurm:
    """A slurmctld with the hooks, and a ``jobs`` that is root's alone."""

    def __init__(self, alone: Controller, state: Path) -> None:
        self.door = Slurm(environ={**os.environ, **alone.env})
        self.jobs = state / "jobs"

    def submit(self, recorded: int, plain: int = 1) -> list[int]:
        """Start jobs of a user; the first ones leave a record, as robust-srun's do."""
        words = ["-N1", f"--uid={USER.pw_uid}"]  # 26.05 takes nobody by number only
        jobs = [
            self.door.submit("#!/bin/sh\nsleep 9\n", args=words, cwd=Path("/"))
            for _ in range(recorded + plain)
        ]
        for number, job in enumerate(jobs):
            self.wait(job, "CONFIGURING")
            until((self.jobs / str(job)).is_dir, "its directory", SOON)
            until(lambda job=job: self.owner(job) == USER.pw_uid, "its owner", SOON)
            if number < recorded:
                (self.jobs / str(job) / USED).mkdir()
        return jobs

    def plan(self, job: int) -> None:
        """Leave a plan that excludes a node."""
        path = self.jobs / str(job) / NAME
        replace_file(path, RequeuePlan(0, ("c7",), 1).as_record())
        os.chown(path, USER.pw_uid, USER.pw_gid)

    def owner(self, job: int) -> int:
        return (self.jobs / str(job)).stat().st_uid

    def wait(self, job: int, state: str, restarts: int = 0) -> Job:
        def there() -> bool:
            found = self.door.job(job)
            return found.state == state and found.restarts == restarts

        until(there, f"job {job} {state}", SOON, every=0.1)
        return self.door.job(job)


@pytest.fixture(scope="module")
def hooked() -> Iterator[HookedSlurm]:
    top = Path(tempfile.mkdtemp(prefix="robust-hooks-"))
    top.chmod(0o755)
    state = top / "state"
    (state / "jobs").mkdir(parents=True, mode=0o755)
    hook = controller.path(str(top / "etc"))
    alone = Controller(8, "".join(f"{key}={hook}\n" for key in controller.KEYS))
    install(top / "etc", state, alone.env["SLURM_CONF"], alone.commands)
    try:
        with alone:
            yield HookedSlurm(alone, state)
    finally:
        shutil.rmtree(top)


def test_a_requeued_robust_job_starts_at_once(hooked: HookedSlurm) -> None:
    door = hooked.door
    held, robust, planned, later, plain = jobs = hooked.submit(recorded=4)
    hooked.plan(planned)
    hooked.plan(later)
    door._run(("scontrol", "requeuehold", str(held)))
    began = time.time()
    for job in jobs[1:]:
        door.requeue(job)
    hooked.wait(later, "PENDING", 1)
    door.update_job(later, start_time=time.time() + 60)  # as its user may
    for job in (later, planned):  # now Slurm knows the node that the plan excludes
        door.update_job(job, exclude=["c7"])
    hooked.wait(robust, "CONFIGURING", 1)
    assert "c7" not in hooked.wait(planned, "CONFIGURING", 1).nodes
    assert time.time() - began < 4 * SOON
    assert door.job(held).state in ("PENDING", "REQUEUE_HOLD")
    # The user's wish stays, and Slurm's own delay where there is no record.
    assert door.job(later).state == door.job(plain).state == "PENDING"
    assert float(door.job(plain).raw["EligibleTime"]) - began > 100
    for job in jobs:
        door.cancel(job)


def test_a_directory_that_no_record_needed_goes_with_its_job(hooked: HookedSlurm) -> None:
    recorded, plain = hooked.submit(recorded=1)
    for job in (plain, recorded):
        hooked.door.cancel(job)
    until(lambda: not (hooked.jobs / str(plain)).exists(), "its end", 4 * SOON)
    assert (hooked.jobs / str(recorded) / USED).is_dir()
