"""Reads what a state directory holds about lost nodes: jobs' records, the node gate's histories.

Links and pipes are not followed, sizes and numbers are capped, and what could not be read is
told, never raised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from standby.history import (
    Loss,
    Span,
    believable,
    chronicle_spans,
    drain,
    incident,
    lines,
    roster_spans,
)
from standby.observed import Observed, observe
from status.files import job_ids, read_capped, read_state
from status.records import clean

MAX_JOBS = 5000  # the newest
MAX_NODES = 20_000
INCIDENTS_BYTES = 16 << 20  # the newest end of a file is read
CHRONICLE_BYTES = 64 << 20
HISTORY_BYTES = 8 << 20
_FLEET = "drains.jsonl"  # the circuit breaker's, among the nodes' histories
MAX_PROBLEMS = 20


class Ledger:
    """All losses and spans of a state directory."""

    def __init__(self, state_dir: Path, now: float) -> None:
        self._dir = state_dir
        self._now = now
        self.losses: list[Loss] = []
        self.spans: dict[int, list[Span]] = {}
        self.problems: list[str] = []
        self._jobs()
        self._nodes()

    def observed(self, given_node_days: float | None, since: float) -> Observed:
        told: Sequence[str] = self.problems
        if len(told) > MAX_PROBLEMS:
            told = [*told[:MAX_PROBLEMS], f"{len(told) - MAX_PROBLEMS} more of this kind"]
        return observe(self.losses, self.spans, told, given_node_days, since)

    def _jobs(self) -> None:
        jobs = self._dir / "jobs"
        try:
            ids = job_ids(self._dir)
        except FileNotFoundError:
            return
        except OSError as error:
            self.problems.append(f"cannot read {jobs}: {error.strerror or error}")
            return
        if len(ids) > MAX_JOBS:
            self.problems.append(f"{len(ids) - MAX_JOBS} older jobs in {jobs} were not looked into")
        for job in ids[:MAX_JOBS]:
            self._job(job, jobs / str(job))

    def _job(self, job: int, directory: Path) -> None:
        if directory.is_symlink():  # another job's records, once more
            self.problems.append(f"{directory} is a link; left out")
            return
        files = read_state(self._dir, job)
        self.problems += files.problems
        for record in self._records(directory / "incidents.jsonl", INCIDENTS_BYTES):
            loss = incident(record, job)
            if loss is not None:
                self.losses.append(loss)
        end = max((roster.updated for roster in files.rosters), default=0.0)
        chronicle = self._records(directory / "events.jsonl", CHRONICLE_BYTES)
        told = list(chronicle_spans(chronicle, end))
        if not told:  # lost, or from before there was one
            told = [span for roster in files.rosters for span in roster_spans(roster)]
        spans = [span for span in told if believable(span, self._now)]
        if len(spans) < len(told):
            self.problems.append(
                f"{directory}: {len(told) - len(spans)} nodes' times cannot be; left out"
            )
        if spans:
            self.spans[job] = spans

    def _nodes(self) -> None:
        directory = self._dir / "nodes"
        try:
            names = sorted(
                path.name
                for path in directory.iterdir()
                if path.name.endswith(".jsonl") and path.name != _FLEET
            )
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            self.problems.append(f"cannot read {directory}: {error.strerror or error}")
            return
        if len(names) > MAX_NODES:
            self.problems.append(f"{directory}: {len(names) - MAX_NODES} files were not read")
        for name in names[:MAX_NODES]:
            for record in self._records(directory / name, HISTORY_BYTES):
                loss = drain(record, name.removesuffix(".jsonl"))
                if loss is not None:
                    self.losses.append(loss)

    def _records(self, path: Path, limit: int) -> Sequence[Mapping[str, Any]]:
        shown = clean(str(path))
        try:
            found = lines(read_capped(path, limit, tail=True), self._now)
        except FileNotFoundError:
            return ()
        except OSError as error:
            self.problems.append(f"cannot read {shown}: {clean(error.strerror or str(error))}")
            return ()
        if found.bad:
            self.problems.append(f"{shown}: {found.bad} unreadable lines skipped")
        return found.records
