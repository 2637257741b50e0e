"""Names of a job's directory below ``<state_dir>/jobs``, where every user may make directories.

Job ids are sequential, so anybody can make ``jobs/<id>`` of a job that is still to come. A job then
takes the next of its names, and readers accept only a directory that belongs to the job's user:
what others made costs nobody more than PLACES lookups by name, and is ignored. The names are tried
in order without listing ``jobs``, which may hold any number of entries.
"""

from __future__ import annotations

import os
import re
import stat

PLACES = 8  # names of one job's directory
LOG = "robust-srun.log"  # in it
_NAME = re.compile(r"([1-9]\d{0,9})(?:\.(\d{1,10})\.\d)?", re.ASCII)


def names(job: int, uid: int) -> list[str]:
    """The names that the directory of this user's job may have, the usual one first. Pure."""
    return [str(job), *(f"{job}.{uid}.{number}" for number in range(1, PLACES))]


def parse(name: str) -> tuple[int, int | None] | None:
    """The job of a directory's name, and the uid if the name has one; None: no such name. Pure."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return int(match[1]), int(match[2]) if match[2] else None


def owner(path: str) -> int | None:
    """The uid of a directory; None for a link, a file, what is not there, and what cannot be seen.

    A user may mount there what refuses all others: that is no error of the jobs beside it.
    """
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return info.st_uid if stat.S_ISDIR(info.st_mode) else None


def find(jobs: str, job: int, uid: int) -> str | None:
    """The name of the job's directory in ``jobs``; None if its user has made none."""
    return next((name for name in names(job, uid) if owner(f"{jobs}/{name}") == uid), None)
