"""Detect another robust-srun of the job by a lock in the job's directory, held while it runs."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from pathlib import Path

from robust_slurm.text import one_line

_held: list[int] = []  # descriptors, open until this process ends


def running_beside(job_dir: Path, restart: str, deadline: float = 5.0) -> str:
    """Take the job's lock; return who has it ("" if we do).

    ``restart``: Slurm's count of the job's starts. Each has a lock of its own, since a lock on a
    shared file system may outlive the host that held it. Where locks cannot be had, or the file
    system does not answer within ``deadline`` seconds, "" is returned, too.
    """
    found: list[str] = []
    path = job_dir / f".supervisor-{int(restart) if restart.isdecimal() else 0}.lock"

    def attempt() -> None:
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            # Not flock, which a child that we leave behind would hold on to.
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held.append(fd)
            with contextlib.suppress(OSError):  # no space: the lock holds all the same
                os.ftruncate(fd, 0)
                os.write(fd, f"process {os.getpid()} on {os.uname().nodename}".encode())
        except OSError as error:
            if fd >= 0 and error.errno in (errno.EAGAIN, errno.EACCES):
                found.append(
                    one_line(os.pread(fd, 200, 0).decode(errors="replace")) or "another process"
                )
            if fd >= 0:
                os.close(fd)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(deadline)
    return found[0] if found else ""
