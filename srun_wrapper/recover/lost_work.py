"""Estimate what a restart cost where the program's steps are not numbered.

A program that saves its state by itself goes on from the newest file that it has saved. The files
looked at are those that its ranks were seen to write, and what lies beside them, in the working
directory and in the directories that its command names.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from robust_slurm.text import one_line, span
from srun_wrapper.decide.incident import Incident
from srun_wrapper.decide.saved_files import SavedFile, newest, saves_state
from srun_wrapper.job.progress import Progress
from srun_wrapper.job.state import JobState
from srun_wrapper.run_in_thread import run_in_thread

SEARCH = 2.0  # s for the search, at a restart
ENTRIES = 20_000  # files and directories that are looked at
DEPTH = 4
SKEW = 1.0  # s that a file server's clock may be ahead
_SKIPPED = {"__pycache__", "site-packages", "node_modules", "wandb", "proc", "sys", "dev"}


def directories(command: Sequence[str], cwd: str, written: Iterable[str]) -> list[str]:
    """Return the directories to search, likely ones first (pure).

    ``command``: the program's words; ``written``: files that its ranks were seen to write.
    """
    found = [os.path.dirname(path) for path in written]  # noqa: PTH120 - text only
    found += [os.path.dirname(path) for path in found]  # noqa: PTH120 - step_40/model.pt
    for word in command[1:]:
        path = word.partition("=")[2] or word
        if "/" in path:
            path = os.path.normpath(os.path.join(cwd, path))  # noqa: PTH118
            found += [path, os.path.dirname(path)]  # noqa: PTH120
    wide = {"/", "/home", "/tmp", "/usr", "/usr/bin", "/opt"}
    return list(dict.fromkeys(path for path in (*found, cwd) if path not in wide))


def search(roots: Sequence[str], since: float, until: float) -> SavedFile | None:
    """Return the checkpoint file below ``roots`` that was written last, between two times."""
    deadline = time.monotonic() + SEARCH
    return newest(_files(roots, since, deadline), since, until)


def _files(roots: Sequence[str], since: float, deadline: float) -> Iterator[SavedFile]:
    todo = deque((root, 0) for root in roots)
    seen, left = set[str](), ENTRIES
    while todo:
        directory, depth = todo.popleft()
        if directory in seen:
            continue
        seen.add(directory)
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    left -= 1
                    if left < 0 or time.monotonic() > deadline:
                        return
                    if entry.is_dir(follow_symlinks=False):
                        if depth < DEPTH and entry.name not in _SKIPPED and entry.name[0] != ".":
                            todo.append((entry.path, depth + 1))
                    elif entry.is_file(follow_symlinks=False):
                        info = entry.stat(follow_symlinks=False)
                        if info.st_mtime >= since and saves_state(entry.path, info.st_size):
                            yield SavedFile(entry.path, info.st_mtime)
        except OSError:
            continue


class LostWork:
    """Estimates what the restart of an incident costs."""

    def __init__(self, state: JobState, command: Sequence[str]) -> None:
        self._state = state
        self._command = tuple(command)
        self._began = time.time()

    async def newest_file(self, incident: Incident) -> SavedFile | None:
        """Return the file that the program saved its state in last before the fault."""
        until = incident.wall - (incident.detected - incident.last_good)
        written = reversed(self._state.written)
        try:
            roots = directories(self._command, str(Path.cwd()), written)
            found = await run_in_thread(
                lambda: search(roots, self._began, until + SKEW), SEARCH + 1.0
            )
        except (OSError, RuntimeError, TimeoutError, ValueError):
            return None  # the restart goes on without an estimate
        return None if found is None else found._replace(time=min(found.time, until))


def estimate(
    incident: Incident, progress: Progress, file: SavedFile | None, *, anew: bool = False
) -> None:
    """Enter into the incident what is lost if training goes on from this file; without one
    nothing is known (pure). ``anew``: the optimizer has begun anew."""
    if anew and progress.beats_at_failure:
        incident.estimate = "the optimizer counts its steps from 1 again"
        incident.guessed_steps = progress.beats_at_failure
        return
    if file is None:
        return
    good = incident.last_good
    before = incident.wall - (incident.detected - good) - file.time  # s from the file to the fault
    at = good - before
    where = one_line(file.path, 200)
    incident.estimate = f"newest file written {where} {span(before)} before"
    incident.lost_s = max(0.0, good - max(at, incident.began or at))
    if progress.beats_at_failure:
        incident.guessed_steps = progress.beats_at_failure - progress.made_by(at)
