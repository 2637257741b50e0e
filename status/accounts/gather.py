"""Read the sources of accounts: the records of jobs, and sacct where Slurm has accounting."""

from __future__ import annotations

import pwd
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from robust_slurm.slurm import Slurm, SlurmError
from robust_slurm.state_dir import job_dirs as names
from robust_slurm.state_dir.files import RecordBudgets, job_dirs, read_incidents, read_rosters
from robust_slurm.state_dir.progress import JobRun, Point, read_progress
from robust_slurm.state_dir.records import IncidentRecord, Roster, clean
from status.accounts.timeline import JobHistory, redone
from status.model import LIVE, SlurmView, status_of

UserOf = Callable[[int, str], str]


def user_of(uid: int, claimed: str) -> str:
    """Return the name of a directory's owner, since a user may claim any name in the records."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid) if uid >= 0 else claimed


def read_histories(
    state_dir: Path,
    view: SlurmView,
    now: float,
    only: int | None = None,
    user: UserOf = user_of,
) -> tuple[list[JobHistory], list[str]]:
    """The histories of the newest jobs, newest first, and what could not be read."""
    problems: list[str] = []
    found, budgets = [], RecordBudgets()
    for job, directory in job_dirs(state_dir, problems, view.owners, only=only):
        budget = budgets.of(directory)
        rosters = read_rosters(job, directory, problems, budget)
        incidents, wrong = read_incidents(directory, budget)
        runs, bad = read_progress(directory, budget)
        problems += [*wrong, *bad]
        uid = names.owner(str(directory))
        owner = -1 if uid is None else uid
        name = user(owner, rosters[0].user if rosters else "")
        for run in runs:
            run.points, run.placings = paces(run.points, incidents), []
        if (one := history(job, name, owner, rosters, incidents, runs, view, now)) is not None:
            found.append(one)
    return sorted(found, key=lambda one: -one.job_id), problems


def paces(points: Sequence[Point], incidents: Sequence[IncidentRecord]) -> list[Point]:
    """The points that accounts need: the last one, and the last before each incident. Pure."""
    known = sorted((p for p in points if p.step_time_s), key=lambda p: p.time)
    times = [p.time for p in known]
    found = {bisect_right(times, one.time) - 1 for one in incidents} - {-1}
    return [*(known[at] for at in sorted(found)), *points[-1:]]


def history(
    job: int,
    user: str,
    uid: int,
    rosters: Sequence[Roster],
    incidents: Sequence[IncidentRecord],
    runs: Sequence[JobRun],
    view: SlurmView,
    now: float,
) -> JobHistory | None:
    """A job's history; None if nothing says when it ran. Pure."""
    live = any(status_of(roster, view, now) in LIVE for roster in rosters)
    notes: list[str] = []
    if not runs:
        runs = [_from_roster(r, incidents, live) for r in rosters if r.started is not None]
        notes = (
            ["an older robust-srun recorded no start-up times: they are computed"] if runs else []
        )
    if not runs:
        return None
    if runs[-1].ended is None and not live:
        heard = [r.updated for r in rosters if r.updated >= runs[-1].started]
        runs[-1].ended = max(heard, default=None)
    newest = max(rosters, key=lambda r: r.updated, default=None)
    return JobHistory(
        job,
        newest.job_name if newest else "",
        user,
        uid,
        live,
        runs,
        incidents,
        step_time=newest.step_time_s if newest else None,
        notes=tuple(notes),
    )


def _from_roster(roster: Roster, incidents: Sequence[IncidentRecord], live: bool) -> JobRun:
    """Return the run of an older robust-srun's roster; start-up is the unexplained lost time."""
    started = roster.started or 0.0
    run = JobRun(started, roster.step_id, "", roster.ranks)
    run.ended = None if live else roster.updated
    if roster.unproductive_s is None:
        run.first_step = started
        return run
    mine = [i for i in incidents if i.time >= started]
    lost = sum(i.phases.get("total", 0.0) + redone(i, (), roster.step_time_s) for i in mine)
    run.first_step = started + max(0.0, roster.unproductive_s - lost)
    return run


def with_spans(found: Sequence[JobHistory], door: Slurm) -> tuple[list[JobHistory], str]:
    """Return the histories with sacct's times, and the reason if there are none."""
    try:
        spans = door.accounted([one.job_id for one in found])
    except SlurmError as error:
        why = f"no times of sacct, only those of robust-srun are counted: {clean(str(error), 120)}"
        return list(found), why
    return [replace(one, spans=spans.get(one.job_id, ())) for one in found], ""
