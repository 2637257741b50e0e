"""The job's files in the state directory: incidents, roster, reports.

``<state_dir>/jobs/<jobid>/`` belongs to the user (``job_dirs`` has its other names). A job that
cannot have such a directory runs without records. All writing happens in one thread behind a queue,
because the directory is on a shared file system that may be slow or dead, and nothing that watches
the job may ever wait for it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import queue
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from robust_slurm.state_dir import job_dirs

VERSION = 1
MAX_WAITING = 4096
OTHER_USER = 2.0  # s
WITHDRAWN = ".withdrawn.json"  # ends the name of a report's withdrawal
_END = object()
_log = logging.getLogger("robust-srun.events")


class StateDirError(OSError):
    """No directory for the job's records can be had."""


def prepare(state_dir: Path, job: int, deadline: float = 10.0) -> Path:
    """Create the job's directory and prove that it can be written, within ``deadline`` seconds.

    Raises StateDirError naming the directory and the reason.
    """
    found: list[Path] = []
    failure: list[str] = []

    def attempt() -> None:
        try:
            made = make_job_dir(state_dir, job)
            with tempfile.NamedTemporaryFile(dir=made, prefix=".probe-"):
                pass
            found.append(made)
        except OSError as err:
            failure.append(err.strerror or str(err))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(deadline)
    if found:
        return found[0]
    reason = failure[0] if failure else f"no answer from the file system in {deadline:g} s"
    raise StateDirError(f"cannot write {state_dir / 'jobs' / str(job)}: {reason}")


def make_job_dir(state_dir: Path, job: int) -> Path:
    """Make the job's own directory in ``jobs``, where every user may make directories, as in /tmp.

    It gets the first of its names that is ours already (a requeued job), or else the first that
    nobody has taken (see ``job_dirs``). Raises OSError, also if other users have taken all of them.
    """
    jobs = state_dir / "jobs"
    state_dir.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + OTHER_USER
    while not jobs.is_dir():
        try:
            _make_everybodys(jobs)
        except PermissionError:  # whoever made its parent is about to make it
            if time.monotonic() > until:
                raise
            time.sleep(0.02)
    uid = os.getuid()
    name = job_dirs.find(str(jobs), job, uid) or _taken_now(jobs, job, uid)
    (jobs / name / "accusations").mkdir(exist_ok=True)
    return jobs / name


def _taken_now(jobs: Path, job: int, uid: int) -> str:
    for name in job_dirs.names(job, uid):
        try:
            (jobs / name).mkdir()
            return name
        except FileExistsError:
            if job_dirs.owner(str(jobs / name)) == uid:  # by another step of this job, just now
                return name
    other = job_dirs.owner(str(jobs / str(job)))
    whose = "are links or files" if other is None else f"belong to other users (uid {other})"
    why = f"it and its {job_dirs.PLACES - 1} alternatives {whose}"
    raise PermissionError(errno.EPERM, why)


def _make_everybodys(jobs: Path) -> None:
    """Create the directory so that it never has other rights than those of /tmp.

    The umask belongs to all threads of the process, and the file system may stall: it stays.
    """
    made = Path(tempfile.mkdtemp(prefix=".jobs-", dir=jobs.parent))
    made.chmod(0o1777)
    try:
        made.rename(jobs)
    except OSError:  # another job has made it, and uses it
        made.rmdir()
        if not jobs.is_dir():
            raise


class JobLedger:
    """Writes one job's records without ever making its caller wait; "" for the directory: none."""

    def __init__(self, job_dir: Path | str, *, observes: bool = False) -> None:
        """``observes``: no node is reported."""
        self.observes = observes
        self.dir = Path(job_dir) if job_dir else None
        self._queue: queue.Queue[Any] = queue.Queue(MAX_WAITING)
        self.error = ""  # why the last record that was lost could not be written
        self.dropped = 0  # records lost because the file system did not take them
        self._writing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def incident(self, record: Mapping[str, Any]) -> None:
        """Append one line to incidents.jsonl."""
        self._put(("append", "incidents.jsonl", {"v": VERSION, **record}))

    def progress(self, record: Mapping[str, Any]) -> None:
        """Append one line to progress.jsonl."""
        self._put(("append", "progress.jsonl", record))

    def event(self, name: str, **fields: Any) -> None:
        """Append one line to events.jsonl, the job's own chronicle, with its own time, and log it.

        An event with a ``text`` is not logged here: ``say`` or ``news`` has logged that text.
        """
        if "text" not in fields:
            _log.info("%s: %s", name, ", ".join(f"{key}={fields[key]}" for key in fields))
        self._put(("append", "events.jsonl", {"time": time.time(), "event": name, **fields}))

    def roster(self, step_id: str, roster: Mapping[str, Any]) -> None:
        """Replace roster.<step>.json (skipped while earlier writes are still waiting)."""
        if self._queue.qsize() < 16:
            self._put(("replace", f"roster.{step_id}.json", {"version": VERSION, **roster}))

    def code(self, book: Mapping[str, Any]) -> None:
        """Replace code.json, the record of the code's versions and changes."""
        self._put(("replace", "code.json", book))

    def report_node(self, node: str, incident: str, record: Mapping[str, Any]) -> None:
        """Write a report for the node gate to verify; in observe mode only an event."""
        if self.observes:
            self.event("would_report", node=node, incident=incident, **record)
            return
        name = f"accusations/{node}.{incident}.json"
        self._put(("replace", name, {"v": VERSION, "node": node, "incident": incident, **record}))

    def withdraw(self, node: str, incident: str, job: int, why: str, cause: str) -> None:
        """Record beside a report that it was wrong, and the incident's cause as known now."""
        name = f"accusations/{node}.{incident}{WITHDRAWN}"
        about = {"v": VERSION, "node": node, "incident": incident, "job": job}
        self._put(
            ("replace", name, {**about, "time": time.time(), "withdrawn": why, "cause": cause})
        )

    def close(self, deadline: float = 5.0) -> None:
        """Write what waits, for at most ``deadline`` seconds; what is left then counts as lost."""
        full = False
        try:
            self._queue.put_nowait(_END)
        except queue.Full:
            full = True
        self._thread.join(deadline)
        if self._thread.is_alive() and self.dir is not None:
            waiting = self._queue.qsize() + self._writing - (not full)  # _END is no record
            self._lose(max(0, waiting), f"no answer from the file system in {deadline:g} s")

    def _put(self, item: Any) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._lose(1, f"no answer from the file system while {MAX_WAITING} records waited")

    def _lose(self, records: int, why: str) -> None:
        if records:
            self.dropped += records
            self.error = f"{self.dir}: {why}"

    def _run(self) -> None:
        while (item := self._queue.get()) is not _END:
            how, name, record = item
            if self.dir is None:
                continue
            self._writing = True
            try:
                if how == "append":
                    append_line(self.dir / name, record)
                else:
                    replace_file(self.dir / name, record)
            except OSError as err:
                self.error = f"{self.dir / name}: {err.strerror or err}"
                self.dropped += 1
            self._writing = False


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one JSON line in a single write, so that lines of several writers never mix."""
    line = json.dumps(record, separators=(",", ":"), default=str).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line  # a torn last line stays alone
        if os.write(fd, line) != len(line):
            raise OSError(errno.ENOSPC, "the line was only written in part")
    finally:
        os.close(fd)


def replace_file(path: Path, record: Mapping[str, Any]) -> None:
    """Replace a JSON file atomically."""
    replace_content(path, json.dumps(record, separators=(",", ":"), default=str), 0o644)


def replace_content(path: Path, text: str, mode: int) -> None:
    """Replace a file atomically. Raises OSError; then the old one stands."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)  # noqa: PTH101 - a plain name from mkstemp
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
