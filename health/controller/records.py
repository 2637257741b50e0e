"""The job's directory in the state directory, read by SlurmUser: its content may be hostile.

It is opened by descriptors, links are refused and owners compared, so that users can change only
what concerns their own jobs.
"""

from __future__ import annotations

import os
import stat
from contextlib import AbstractContextManager

from health.node import rootfiles
from health.node.rootfiles import closing
from robust_slurm.state_dir import job_dirs
from robust_slurm.state_dir.requeue_plan import LIMIT, NAME, RequeuePlan, plan_from

JOBS = "jobs"
USED = "accusations"  # robust-srun makes it with its first record
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def opened(state_dir: str) -> AbstractContextManager[int]:
    """Open ``jobs``, which only root or SlurmUser can have put there. Raises OSError."""
    return closing(rootfiles.open_dir(f"{state_dir}/{JOBS}"))


def closed_to_users(jobs: int) -> bool:
    """Return whether users cannot make directories of their own there."""
    return not os.fstat(jobs).st_mode & 0o002


def _own(jobs: int, job: int, uid: int) -> int | None:
    """Open the job's directory, the first of its names that belongs to its user. Raises OSError."""
    for name in job_dirs.names(job, uid):
        try:
            info = os.lstat(name, dir_fd=jobs)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != uid:
            continue
        found = os.open(name, _DIR, dir_fd=jobs)
        if os.fstat(found).st_uid == uid:
            return found
        os.close(found)
    return None


def has_run(jobs: int, job: int, uid: int) -> bool:
    """Return whether robust-srun has kept records of this job. Raises OSError."""
    own = _own(jobs, job, uid)
    if own is None:
        return False
    with closing(own):
        try:
            return stat.S_ISDIR(os.lstat(USED, dir_fd=own).st_mode)
        except FileNotFoundError:
            return False


def plan_of(jobs: int, job: int, uid: int) -> RequeuePlan | None:
    """Read what robust-srun asks of the next start; None: nothing. Raises OSError, ValueError."""
    own = _own(jobs, job, uid)
    if own is None:
        return None
    with closing(own):
        try:
            file = os.open(NAME, _FILE, dir_fd=own)
        except FileNotFoundError:
            return None
    with os.fdopen(file, "rb") as stream:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != uid or info.st_size > LIMIT:
            raise ValueError("no plain file of the job's user, or a large one")
        return plan_from(stream.read(LIMIT))


def make(jobs: int, job: int, uid: int, gid: int) -> str:
    """Make the job's directory for its user, where users cannot; returns its name, "": not made.

    Only root can give a directory away. Raises OSError.
    """
    if os.geteuid() != 0 or not closed_to_users(jobs):
        return ""
    for name in job_dirs.names(job, uid):
        try:
            os.mkdir(name, 0o700, dir_fd=jobs)
        except FileExistsError:
            pass
        try:
            made = os.open(name, _DIR, dir_fd=jobs)
        except OSError:  # a link, or a file: somebody with rights has put it there
            continue
        with closing(made):
            info = os.fstat(made)
            if info.st_uid == uid:
                return name
            # root's and empty: just made, or left by a hook that was cut off.
            unused = stat.S_IMODE(info.st_mode) == 0o700 and not os.listdir(made)  # noqa: PTH208
            if info.st_uid == 0 and unused:
                os.fchown(made, uid, gid)
                os.fchmod(made, 0o755)
                return name
    return ""


def remove_unused(jobs: int, job: int, uid: int) -> None:
    """Remove the directory again, where ``make`` made it and nothing was written there."""
    if os.geteuid() != 0 or not closed_to_users(jobs):
        return
    for name in job_dirs.names(job, uid):
        try:
            if os.lstat(name, dir_fd=jobs).st_uid == uid:
                os.rmdir(name, dir_fd=jobs)
                return
        except OSError:  # not there, or not empty: records
            continue
