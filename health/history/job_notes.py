"""The jobs that were here: notes in the spool, for reports that come after a job's epilog."""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

from health.history.node_reports import ReportingJob, main_job_of
from health.node import rootfiles
from health.node.rootfiles import closing
from health.node.system import Context
from robust_slurm.hostlist import expand
from robust_slurm.text import one_line

LATE_S = 3600.0  # how long after a job's end a report is still looked for
_NOTES = "jobs"
_NOTE_LIMIT = 64 << 10  # bytes
_MOST_NOTES = 256


class JobNote(NamedTuple):
    """A job that was here, by Slurm's word to the epilog: a report's owner is compared with it."""

    job: int
    uid: int
    gid: int
    also: int  # the job to which it added a standby node; 0: it is no standby allocation
    time: float
    known: tuple[str, ...]  # names of files that were dealt with
    nodes: int = 1  # of the job
    account: str = ""  # Slurm's; "": not told

    @property
    def reporting_jobs(self) -> list[ReportingJob]:
        """The directories to look into, by job and owner."""
        own = ReportingJob(self.job, self.uid, self.gid, self.job)
        return [own, own._replace(of=self.also)] if self.also else [own]


def note_of(context: Context, now: float) -> JobNote | None:
    """The note on the job of an epilog; None outside a job, and for root's own."""
    if context.job <= 0 or context.uid <= 0:
        return None
    gid = context.env.get("SLURM_JOB_GID", "")
    nobody = 65534
    return JobNote(
        context.job,
        context.uid,
        int(gid) if gid.isascii() and gid.isdigit() and int(gid) > 0 else nobody,
        main_job_of(context.env.get("SLURM_JOB_COMMENT", "")),
        now,
        (),
        _count(context.env.get("SLURM_JOB_NODELIST") or context.env.get("SLURM_NODELIST", "")),
        one_line(context.env.get("SLURM_JOB_ACCOUNT", ""), 64),
    )


def _count(hostlist: str) -> int:
    try:
        return max(1, len(set(expand(hostlist))))
    except ValueError:
        return 1


def save(spool: str, note: JobNote) -> None:
    """Write a note; what an earlier one on the same job knows stays known. Raises OSError."""
    os.makedirs(f"{spool}/{_NOTES}", 0o755, exist_ok=True)  # noqa: PTH103
    with closing(rootfiles.open_dir(f"{spool}/{_NOTES}")) as directory:
        old = _load(directory, f"{note.job}.json")
        known = tuple(dict.fromkeys((*(old.known if old else ()), *note.known)))
        content = json.dumps(note._replace(known=known)).encode()
        rootfiles.replace(directory, f"{note.job}.json", content)


def notes(spool: str, now: float) -> list[JobNote]:
    """The jobs that were here lately, newest first; older notes are removed. Raises OSError."""
    try:
        directory = rootfiles.open_dir(f"{spool}/{_NOTES}")
    except FileNotFoundError:
        return []
    found = []
    with closing(directory):
        for name in os.listdir(directory):  # noqa: PTH208
            if name.startswith("."):
                continue  # another epilog writes it at this moment
            note = _load(directory, name)
            if note is None or abs(now - note.time) > LATE_S:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory)
            else:
                found.append(note)
    return sorted(found, key=lambda note: -note.time)[:_MOST_NOTES]


def _load(directory: int, name: str) -> JobNote | None:
    try:
        fd = rootfiles.open_file(directory, name, os.O_RDONLY)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        raw = file.read(_NOTE_LIMIT)
    try:
        job, uid, gid, also, at, known, *more = json.loads(raw)
        nodes, account = more or (1, "")  # one of an earlier release has none
        note = JobNote(
            int(job), int(uid), int(gid), int(also), float(at), tuple(map(str, known)),
            int(nodes), str(account),
        )  # fmt: skip
    except (ValueError, TypeError, OverflowError, RecursionError):
        return None
    return note if note.job > 0 and note.uid > 0 else None


def claim(spool: str) -> int | None:
    """Take the lock to verify reports; None: another process of this node has it.

    Returns a descriptor to be closed. Raises OSError.
    """
    with closing(rootfiles.open_dir(spool)) as directory:
        try:
            return rootfiles.lock(directory, "inquiry.lock", wait=False)
        except BlockingIOError:
            return None
