"""Reads what a state directory holds about lost nodes: jobs' records, the node gate's histories.

Links and pipes are not followed, sizes and numbers are capped, and what could not be read becomes
a note, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from robust_slurm.state_dir.files import MAX_STEPS, ROSTER_BYTES, RecordBudgets, content, job_dirs
from robust_slurm.state_dir.node_events import FLEET
from robust_slurm.state_dir.records import Roster, clean, decode, roster_from
from robust_slurm.text import counted
from standby.size.history import (
    Loss,
    Span,
    believable,
    chronicle_spans,
    drain,
    incident,
    lines,
    roster_spans,
)
from standby.size.observed import Observed, observe

MAX_JOBS = 5000  # the newest
MAX_NODES = 20_000
INCIDENTS_BYTES = 16 << 20  # the newest end of a file is read
CHRONICLE_BYTES = 64 << 20
HISTORY_BYTES = 8 << 20
JOBS_BYTES = 512 << 20  # of all jobs' files together, which users write
USER_BYTES = 128 << 20  # of one user's
JOBS_ENTRIES = 1_000_000  # nodes' times and lost nodes in them
MAX_PROBLEMS = 20


class Ledger:
    """All losses and spans of a state directory."""

    def __init__(self, state_dir: Path, now: float) -> None:
        self._dir = state_dir
        self._now = now
        self.losses: list[Loss] = []
        self.spans: dict[int, list[Span]] = {}
        self.problems: list[str] = []
        self._bytes = JOBS_BYTES
        self._budgets = RecordBudgets(USER_BYTES)
        self._entries = JOBS_ENTRIES
        self._jobs()
        self._nodes()

    def observed(self, given_node_days: float | None, since: float) -> Observed:
        told: Sequence[str] = self.problems
        if len(told) > MAX_PROBLEMS:
            told = [*told[:MAX_PROBLEMS], f"{len(told) - MAX_PROBLEMS} more of this kind"]
        return observe(self.losses, self.spans, told, given_node_days, since)

    def _jobs(self) -> None:
        jobs = self._dir / "jobs"
        for job, directory in job_dirs(self._dir, self.problems, most=MAX_JOBS):
            self._job(job, directory)
            if self._bytes <= 0 or self._entries <= 0:
                self.problems.append(
                    f"{jobs}: too much to read; jobs {job} and older are left out, or in part"
                )
                break

    def _job(self, job: int, directory: Path) -> None:
        rosters = self._rosters(job, directory)
        for record in self._of_job(directory / "incidents.jsonl", INCIDENTS_BYTES):
            loss = incident(record, job)
            if loss is not None and self._entries > 0:
                self._entries -= len(loss.nodes)
                self.losses.append(loss)
        end = max((roster.updated for roster in rosters), default=0.0)
        chronicle = self._of_job(directory / "events.jsonl", CHRONICLE_BYTES)
        told = self._taken(chronicle_spans(chronicle, end))
        if not told:  # the file is lost, or the job's release wrote none
            told = self._taken(span for roster in rosters for span in roster_spans(roster))
        spans = [span for span in told if believable(span, self._now)]
        if len(spans) < len(told):
            self.problems.append(
                f"{directory}: {len(told) - len(spans)} nodes' times are impossible; skipped"
            )
        if spans:
            self.spans[job] = spans

    def _taken(self, spans: Iterable[Span]) -> list[Span]:
        """Take as many spans as there is room for."""
        found = list(islice(spans, max(0, self._entries)))
        self._entries -= len(found)
        return found

    def _rosters(self, job: int, directory: Path) -> list[Roster]:
        try:
            names = sorted(
                path.name
                for path in directory.iterdir()
                if path.name.startswith("roster.") and path.name.endswith(".json")
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problems.append(f"cannot read {directory}: {error.strerror or error}")
            return []
        found = []
        for name in names[-MAX_STEPS:]:
            raw = self._of_users(directory / name, ROSTER_BYTES)
            roster = roster_from(decode(raw)) if raw is not None else None
            if roster is not None and roster.job_id == job:
                found.append(roster)
            elif raw is not None:
                shown = clean(str(directory / name))
                self.problems.append(f"{shown} is not a roster of this job; skipped")
        return found

    def _of_job(self, path: Path, limit: int) -> Sequence[Mapping[str, Any]]:
        return self._parsed(path, self._of_users(path, limit, tail=True))

    def _of_users(self, path: Path, limit: int, tail: bool = False) -> bytes | None:
        """Read a user's file, which counts towards JOBS_BYTES; None also if that is reached."""
        if self._bytes < limit:
            self._bytes = 0
            return None
        raw = content(path, limit, self.problems, tail, self._budgets.of(path.parent))
        self._bytes -= len(raw or b"")
        return raw

    def _nodes(self) -> None:
        directory = self._dir / "nodes"
        try:
            names = sorted(
                path.name
                for path in directory.iterdir()
                if path.suffix == ".jsonl" and path.stem not in FLEET
            )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.problems.append(f"cannot read {directory}: {error.strerror or error}")
            return
        if len(names) > MAX_NODES:
            self.problems.append(
                f"{directory}: {counted(len(names) - MAX_NODES, 'file')} were not read"
            )
        for name in names[:MAX_NODES]:
            path = directory / name
            raw = content(path, HISTORY_BYTES, self.problems, tail=True)
            for record in self._parsed(path, raw):
                loss = drain(record, name.removesuffix(".jsonl"))
                if loss is not None:
                    self.losses.append(loss)

    def _parsed(self, path: Path, raw: bytes | None) -> Sequence[Mapping[str, Any]]:
        if raw is None:
            return ()
        found = lines(raw, self._now)
        if found.bad:
            self.problems.append(f"{clean(str(path))}: {found.bad} unreadable lines skipped")
        return found.records
