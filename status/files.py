"""Reads the state directory: rosters, incidents and accusations.

Any user may write there: links and pipes are not followed, sizes and counts are capped, and what
could not be read is told, never raised.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from status.records import (
    Accusation,
    Incident,
    Roster,
    accusation_from,
    clean,
    decode,
    incidents_from,
    roster_from,
)

ROSTER_BYTES = 4 << 20  # 1,250 nodes x 8 ranks are about 200 KB
ACCUSATION_BYTES = 64 << 10
INCIDENTS_BYTES = 4 << 20  # the newest end of the file is read
MAX_JOBS = 500  # the newest job directories that are looked into
MAX_ACCUSATIONS = 1000  # per job
MAX_STEPS = 100  # rosters per job


@dataclass
class StateFiles:
    """All that was read, and what could not be."""

    rosters: list[Roster] = field(default_factory=list)
    accusations: list[Accusation] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read_capped(path: Path, limit: int, tail: bool = False) -> bytes:
    """A regular file's content, or its newest ``limit`` bytes (whole lines) with ``tail``.

    Raises OSError for links, pipes and devices, and for a file beyond the limit without ``tail``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        if status.st_size <= limit:
            return file.read(limit)
        if not tail:
            raise OSError(f"{path} is larger than {limit} bytes")
        file.seek(status.st_size - limit)
        return file.read(limit).partition(b"\n")[2]


def job_ids(state_dir: Path) -> list[int]:
    """Jobs with a directory of their own, newest (highest id) first. Raises OSError."""
    with os.scandir(state_dir / "jobs") as entries:
        names = [e.name for e in entries if e.name.isascii() and e.name.isdigit()]
    return sorted({int(name) for name in names if len(name) < 11}, reverse=True)


def read_state(state_dir: Path, only_job: int | None = None) -> StateFiles:
    """Rosters and accusations of all jobs, or the rosters and accusations of one."""
    found = StateFiles()
    if only_job is not None:
        ids = [only_job]
    else:
        try:
            ids = job_ids(state_dir)
        except FileNotFoundError:
            return found
        except OSError as error:
            found.problems.append(f"cannot read {state_dir / 'jobs'}: {error.strerror or error}")
            return found
        if len(ids) > MAX_JOBS:
            found.problems.append(
                f"{len(ids) - MAX_JOBS} older jobs in {state_dir / 'jobs'} were not looked into"
            )
    for job_id in ids[:MAX_JOBS]:
        _read_job(state_dir / "jobs" / str(job_id), found)
    return found


def _read_job(job_dir: Path, found: StateFiles) -> None:
    for path in _listed(job_dir, "roster.", MAX_STEPS, found.problems):
        if (raw := _content(path, ROSTER_BYTES, found.problems)) is None:
            continue
        roster = roster_from(decode(raw))
        if roster is not None and str(roster.job_id) == job_dir.name:
            found.rosters.append(roster)
        else:
            found.problems.append(f"{clean(str(path))} is no roster of this job; skipped")
    for path in _listed(job_dir / "accusations", "", MAX_ACCUSATIONS, found.problems):
        if (raw := _content(path, ACCUSATION_BYTES, found.problems)) is None:
            continue
        accusation = accusation_from(decode(raw))
        if accusation is not None:
            found.accusations.append(accusation)
        else:
            found.problems.append(f"{clean(str(path))} is no accusation; skipped")


def _listed(directory: Path, prefix: str, most: int, problems: list[str]) -> list[Path]:
    try:
        names = sorted(
            name
            for name in (path.name for path in directory.iterdir())
            if name.startswith(prefix) and not name.startswith(".") and name.endswith(".json")
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"cannot read {directory}: {error.strerror or error}")
        return []
    if len(names) > most:
        problems.append(f"{directory}: {len(names) - most} of {len(names)} files were not read")
    return [directory / name for name in names[-most:]]


def _content(path: Path, limit: int, problems: list[str]) -> bytes | None:
    try:
        return read_capped(path, limit)
    except FileNotFoundError:  # replaced or removed since it was listed
        return None
    except OSError as error:
        problems.append(f"cannot read {clean(str(path))}: {clean(error.strerror or str(error))}")
        return None


def read_incidents(state_dir: Path, job_id: int) -> tuple[list[Incident], list[str]]:
    """A job's incidents, oldest first, and what is wrong with their file."""
    path = state_dir / "jobs" / str(job_id) / "incidents.jsonl"
    try:
        raw = read_capped(path, INCIDENTS_BYTES, tail=True)
    except FileNotFoundError:
        return [], []
    except OSError as error:
        return [], [f"cannot read {path}: {clean(error.strerror or str(error))}"]
    found, bad, torn = incidents_from(raw)
    problems = [f"{path}: {bad} unreadable lines skipped"] if bad else []
    if torn:
        problems.append(f"{path}: torn last line skipped")
    return found, problems
