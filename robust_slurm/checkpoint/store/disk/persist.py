"""Writes one rank's snapshots to the durable tier, beside the training."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from robust_slurm.checkpoint.format.layout import LayoutError
from robust_slurm.checkpoint.store.disk.writing import WriterError, WriterProcess
from robust_slurm.checkpoint.store.events import (
    AlarmEvent,
    CommittedEvent,
    FetchOutcome,
    PersistedEvent,
    StoreEvent,
)
from robust_slurm.checkpoint.store.shelf import ShelfRecord, open_snapshot, read_header

COMMIT_WAIT = 60.0  # s for the other ranks' parts
SLOWEST = 10e6  # bytes/s: below this a writer counts as hanging


class Destination(NamedTuple):
    """Destination of a rank's durable checkpoints, as it enrolled."""

    directory: str
    """Empty: no durable tier."""
    keep: int
    python: str


class PersistJob(NamedTuple):
    path: Path
    owner: int
    step: int
    slot: int
    """The slot that must not be overwritten meanwhile; -1 for none."""
    record: ShelfRecord | None
    """None for a file outside the store's directory."""
    destination: Destination
    commit_world: int
    """> 0: commit afterwards, when so many ranks have written."""
    commit_wait: float
    finished: Callable[[FetchOutcome], None]


class Persister:
    """A thread and a writer process; both start when there is something to write, or ``warm``."""

    def __init__(
        self,
        emit: Callable[[StoreEvent], None],
        write_deadline: float,
        changed: Callable[[], None],
        command: Callable[[str], list[str]],
    ) -> None:
        self._emit = emit
        self._write_deadline = write_deadline
        self._changed = changed
        self._command = command
        self._change = threading.Condition()
        self._jobs: deque[PersistJob] = deque()
        self._now: PersistJob | None = None
        self._writing = False
        self._past = False  # ``_now`` belongs to an epoch that is over
        self._writer: WriterProcess | None = None
        self._thread: threading.Thread | None = None
        self._stop = False
        self._generation = 0  # of epochs, and of timelines within one
        # Of this one, by step:
        self._written: dict[int, tuple[int, str]] = {}  # bytes, attempt
        self._commits: dict[int, list[Callable[[str], None]]] = {}  # under way: who waits for it
        self._committed: set[int] = set()

    def warm(self, destination: Destination) -> None:
        """Start the writer, so that it has imported what it needs before it is asked."""
        with contextlib.suppress(WriterError):  # reported when there is something to write
            self._ready(destination).start()

    def add(self, job: PersistJob) -> None:
        with self._change:
            self._jobs.append(job)
            if self._thread is None and not self._stop:
                self._thread = threading.Thread(target=self._run, name="ckpt-persist", daemon=True)
                self._thread.start()
            self._change.notify_all()

    @property
    def held(self) -> set[int]:
        """Slots that are being or going to be read."""
        with self._change:
            jobs = [*self._jobs] + ([self._now] if self._now and self._writing else [])
            return {job.slot for job in jobs if job.slot >= 0}

    @property
    def steps(self) -> set[int]:
        """Steps of this epoch that are being written or wait for it."""
        with self._change:
            now = [self._now] if self._now and self._writing and not self._past else []
            return {job.step for job in [*self._jobs, *now]}

    @property
    def pid(self) -> int:
        return self._writer.pid if self._writer is not None else 0

    def forget(self, why: str) -> None:
        """Drop writes that have not begun and commits that wait.

        Nothing is reported of either, nor of a write under way: its epoch or timeline is over.
        """
        with self._change:
            jobs = list(self._jobs)
            self._jobs.clear()
            self._written.clear()
            self._commits.clear()
            self._committed.clear()
            self._generation += 1
            self._past = True
            writer = self._writer
        if writer is not None:
            writer.tell({"op": "give_up"})
        for job in jobs:
            job.finished(FetchOutcome(job.owner, job.step, False, why, "", 0.0, 0))

    def stop(self) -> list[threading.Thread]:
        with self._change:
            self._stop = True
            self._change.notify_all()
        if self._writer is not None:
            self._writer.close()
        self.forget("the store is closing")
        return [self._thread] if self._thread is not None else []

    # -- the thread

    def _run(self) -> None:
        while True:
            with self._change:
                while not self._jobs and not self._stop:
                    self._change.wait()
                if self._stop:
                    return
                self._now, self._writing, self._past = self._jobs.popleft(), True, False
                job = self._now
                generation, done = self._generation, self._written.get(job.step)
            self._carry_out(job, generation, done)

    def _carry_out(self, job: PersistJob, generation: int, done: tuple[int, str] | None) -> None:
        """Write and commit one job. ``done``: bytes and attempt if the step is written already."""
        began = time.monotonic()
        why, count, attempt = "", 0, ""
        try:
            count, attempt = done or self._write(job)
        except (WriterError, LayoutError) as err:
            why = str(err)
        except OSError as err:
            why = f"{job.path.name} cannot be read: {err.strerror or err}"
        with self._change:
            self._writing = False
            current = generation == self._generation
            if current and not why:
                self._written[job.step] = count, attempt
        self._changed()
        seconds = time.monotonic() - began
        if current and done is None:
            self._emit(PersistedEvent(job.owner, job.step, not why, why, seconds))
        with self._change:
            self._now = None

        def end(why: str) -> None:
            name = job.path.name
            job.finished(FetchOutcome(job.owner, job.step, not why, why, name, seconds, count))

        if job.commit_world and job.destination.directory:
            self._begin_commit(job, attempt, why, end, generation)
        else:
            end(why)

    def _write(self, job: PersistJob) -> tuple[int, str]:
        """Bytes written, name of the attempt. Raises WriterError, LayoutError, OSError."""
        if job.record is not None and job.record.bad:
            raise WriterError(job.record.bad)
        fd, size, _ = open_snapshot(job.path)
        try:
            header = read_header(fd, size)
            if (header.rank, header.step) != (job.owner, job.step):
                raise WriterError(f"{job.path.name} holds step {header.step} by now")
        finally:
            os.close(fd)
        attempt = header.attempt
        if not job.destination.directory:
            return 0, attempt
        request: dict[str, Any] = {
            "op": "write", "source": str(job.path), "directory": job.destination.directory,
            "attempt": attempt,
        }  # fmt: skip
        if job.record is not None:
            request["digest"] = job.record.digest
        answer = self._ask(job, request, self._write_deadline + size / SLOWEST)
        if job.record is not None and job.record.bad:  # since it began
            raise WriterError(job.record.bad)
        written = answer.get("bytes", 0)
        return (written if isinstance(written, int) else 0), attempt

    def _begin_commit(
        self, job: PersistJob, attempt: str, why: str, end: Callable[[str], None], generation: int
    ) -> None:
        """Commit what was written, unless ``why`` says why nothing was; ``end`` gets the result.

        A commit waits for the other ranks in a thread of its own, so that the next writes need not
        wait for it. There is one for each step: a second request waits for the same commit.
        """
        with self._change:
            current = generation == self._generation
            done = current and job.step in self._committed
            waiting = self._commits.get(job.step) if current and not why else None
            if waiting is not None:
                waiting.append(end)
                return
            ends = [end]
            if current and not why and not done:
                self._commits[job.step] = ends
        if why and current:
            self._emit(CommittedEvent(job.step, False, why))
        if why or done or not current:
            end(why or ("" if done else "its epoch is over"))
            return
        threading.Thread(
            target=self._commit, args=(job, attempt, ends, generation), name="ckpt-commit",
            daemon=True,
        ).start()  # fmt: skip

    def _commit(
        self, job: PersistJob, attempt: str, ends: list[Callable[[str], None]], generation: int
    ) -> None:
        why = ""
        request = {
            "op": "commit", "directory": job.destination.directory, "step": job.step,
            "world": job.commit_world, "attempt": attempt, "wait": job.commit_wait,
            "keep": job.destination.keep,
        }  # fmt: skip
        try:
            answer = self._ask(job, request, job.commit_wait + self._write_deadline)
            for note in answer.get("notes", ()):
                self._emit(AlarmEvent(job.owner, str(note)))
        except WriterError as err:
            why = str(err)
        with self._change:
            current = generation == self._generation
            if current:
                del self._commits[job.step]
                self._committed |= set() if why else {job.step}
        if current or not why:
            self._emit(CommittedEvent(job.step, not why, why))
        for end in ends:
            end(why)

    def _ask(self, job: PersistJob, request: dict[str, Any], deadline: float) -> dict[str, Any]:
        return self._ready(job.destination).request(request, deadline)

    def _ready(self, destination: Destination) -> WriterProcess:
        """Return a writer that is ready. Raises WriterError."""
        with self._change:
            if self._stop:
                raise WriterError("the store is closing")
            if self._writer is None:
                self._writer = WriterProcess(self._command(destination.python))
            return self._writer
