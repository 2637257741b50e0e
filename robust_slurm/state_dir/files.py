"""Reads the state directory: rosters, incidents and reports.

Any user may write there: links and pipes are not followed, sizes and counts are capped, and what
cannot be read is listed as a problem, never raised.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from robust_slurm.state_dir import job_dirs as names
from robust_slurm.state_dir.ledger import WITHDRAWN
from robust_slurm.state_dir.records import (
    MAX_MEMBERS,
    IncidentRecord,
    NodeReport,
    Roster,
    amend,
    clean,
    decode,
    incidents_from,
    node_report_from,
    roster_from,
)
from robust_slurm.text import counted

ROSTER_BYTES = 4 << 20  # 1,250 nodes x 8 ranks are about 200 KB
REPORT_BYTES = 64 << 10
INCIDENTS_BYTES = 4 << 20  # the newest end of the file is read
MAX_JOBS = 500  # the newest job directories that are looked into
MAX_REPORTS = 1000  # per job
MAX_STEPS = 100  # rosters per job
MAX_ENTRIES = 1_000_000  # of the jobs' directory, listed
MAX_INCIDENTS = 1000  # of a job, the newest
MAX_NAMES = 20_000  # of a job's own directory, listed
OWNER_BYTES = 64 << 20
"""Read of one user's directories, all jobs together; each file costs FILE_COST beside its size,
each object in it OBJECT_COST. What is beyond is not read, the oldest jobs first."""
FILE_COST = 4 << 10
OBJECT_COST = 128
MAX_LOOKS = 10_000  # jobs whose directories' owners are looked up, the newest


class RecordBudget:
    """The work that is left for one user's files, over all of the user's jobs."""

    def __init__(self, most: int = 0) -> None:
        """``most``: 0 for OWNER_BYTES."""
        self._most = self._left = most or OWNER_BYTES
        self._told = False

    def spend(self, size: int = 0, files: int = 0, objects: int = 0) -> None:
        """Take from it what was read, and how many objects it has become."""
        self._left -= size + files * FILE_COST + objects * OBJECT_COST

    def over(self, path: Path, problems: list[str]) -> bool:
        """Return whether nothing is left for a file or directory; the first time, that is added to
        ``problems``."""
        if self._left > 0:
            return False
        if not self._told:
            self._told = True
            most = f"{self._most >> 20} MiB of records of one user are read"
            problems.append(f"not read: {clean(str(path))} and what follows: at most {most}")
        return True


class RecordBudgets:
    """A budget for each user, so that no user's files make the readers slow for the others."""

    def __init__(self, most: int = 0) -> None:
        """``most``: see RecordBudget."""
        self._most = most
        self._of: dict[int | None, RecordBudget] = {}

    def of(self, directory: Path) -> RecordBudget:
        """Return the budget of a directory's owner."""
        return self._of.setdefault(names.owner(str(directory)), RecordBudget(self._most))


@dataclass
class StateFiles:
    """Records that were read, and the problems. ``directory``: of the last job that was read."""

    rosters: list[Roster] = field(default_factory=list)
    reports: list[NodeReport] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    directory: Path | None = None


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


def job_dirs(
    state_dir: Path,
    problems: list[str],
    owners: Mapping[int, int] | None = None,
    most: int = MAX_JOBS,
    only: int | None = None,
) -> list[tuple[int, Path]]:
    """The newest jobs with a directory: those that Slurm knows, then the others; newest first.

    Every user can make directories there, also for jobs of others and for jobs to come. What Slurm
    knows (``owners``: job id → uid) decides which directory is the job's and which ids can exist.
    Slurm's jobs come first; of others, a quarter of ``most`` of one owner precedes the rest.
    ``only``: this job alone. A directory that cannot be read is added to ``problems``, and so are
    older jobs that are left out.
    """
    jobs = state_dir / "jobs"
    try:
        found, older = _job_dirs(jobs, owners or {}, most, only)
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"cannot read {jobs}: {error.strerror or error}")
        return []
    if older:
        problems.append(f"not read: {counted(older, 'older job')} in {jobs}")
    return found


def _job_dirs(
    jobs: Path, known: Mapping[int, int], most: int, only: int | None
) -> tuple[list[tuple[int, Path]], int]:
    if only is not None and only in known:
        name = names.find(str(jobs), only, known[only])
        return [(only, jobs / name)] if name else [], 0
    found: dict[int, list[tuple[str, int | None]]] = {}
    with os.scandir(jobs) as entries:
        for entry in islice(entries, MAX_ENTRIES):
            named = names.parse(entry.name)
            if named is not None and only in (None, named[0]):
                found.setdefault(named[0], []).append((entry.name, named[1]))
    newest = max(known, default=max(found, default=0))
    ids = sorted((job for job in found if job <= newest), key=lambda job: (job not in known, -job))
    share = max(1, most // 4)
    of: Counter[int] = Counter()  # jobs that were chosen, by owner
    chosen: list[tuple[int, Path]] = []
    more: list[tuple[int, Path]] = []  # of owners who have had their share
    looked = 0
    for job in ids[:MAX_LOOKS]:
        if len(chosen) >= most:
            break
        looked += 1
        for name, owner in _of_job(jobs, job, found[job], known.get(job)):
            first = job in known or of[owner] < share
            (chosen if first else more).append((job, jobs / name))
            of[owner] += 1
    taken = sorted([*chosen, *more][:most], key=lambda one: (one[0] not in known, -one[0]))
    return taken, len(more) - (len(taken) - len(chosen)) + len(ids) - looked


def _of_job(
    jobs: Path, job: int, found: Sequence[tuple[str, int | None]], uid: int | None
) -> list[tuple[str, int]]:
    """The names of a job's directories, and their owners: one where Slurm knows the job's user.

    Otherwise nobody knows whether the usual name was taken by another user, or the name with a uid
    made later by one: one directory of each owner is read.
    """
    if uid is not None:
        own = names.find(str(jobs), job, uid)
        return [(own, uid)] if own else []
    of: dict[int, str] = {}
    for name, said in sorted(found, key=lambda one: (one[1] is None, one[0])):
        owner = names.owner(str(jobs / name))
        if owner is not None and said in (None, owner):
            of.setdefault(owner, name)
    return [(name, owner) for owner, name in of.items()]


def read_state(
    state_dir: Path,
    owners: Mapping[int, int] | None = None,
    only: int | None = None,
    nodes: int = MAX_MEMBERS,
) -> StateFiles:
    """Rosters and reports of all jobs, or of one; ``owners`` and ``only``: see ``job_dirs``.

    ``nodes``: how many Slurm has; a job has no more.
    """
    found = StateFiles()
    budgets = RecordBudgets()
    for job, directory in job_dirs(state_dir, found.problems, owners, only=only):
        found.directory = directory
        budget = budgets.of(directory)
        found.rosters += read_rosters(job, directory, found.problems, budget, nodes)
        found.reports += _node_reports(directory, found.problems, budget)
    return found


def read_rosters(
    job: int, job_dir: Path, problems: list[str], budget: RecordBudget, nodes: int = MAX_MEMBERS
) -> list[Roster]:
    """The last reports of a job's steps; what could not be read is added to ``problems``."""
    found: list[Roster] = []
    for path in _listed(job_dir, "roster.", MAX_STEPS, problems, budget):
        if (raw := content(path, ROSTER_BYTES, problems, budget=budget)) is None:
            continue
        roster = roster_from(decode(raw), nodes)
        if roster is not None:
            budget.spend(objects=sum(1 + len(node.ranks) for node in roster.nodes))
        if roster is not None and roster.job_id == job:
            found.append(roster)
        else:
            problems.append(f"{clean(str(path))} is not a roster of this job; skipped")
    return found


def _node_reports(job_dir: Path, problems: list[str], budget: RecordBudget) -> list[NodeReport]:
    """Return the job's reports against nodes; withdrawn ones say why, and when."""
    said: list[NodeReport] = []
    wrong: dict[tuple[str, str], NodeReport] = {}
    for path in _listed(job_dir / "accusations", "", MAX_REPORTS, problems, budget):
        if (raw := content(path, REPORT_BYTES, problems, budget=budget)) is None:
            continue
        report = node_report_from(decode(raw))
        if report is None:
            problems.append(f"{clean(str(path))} is not a report against a node; skipped")
        elif path.name.endswith(WITHDRAWN):
            wrong[report.node, report.incident] = report
        else:
            said.append(replace(report, withdrawn=""))
    for number, one in enumerate(said):
        back = wrong.get((one.node, one.incident))
        if back is not None:
            said[number] = replace(one, withdrawn=back.withdrawn or "wrong", withdrawn_at=back.time)
    return said


@dataclass(frozen=True)
class JobRecord:
    """A job's reports against nodes, and its incidents. ``uid``: the owner of its directory."""

    job_id: int
    uid: int
    reports: tuple[NodeReport, ...]
    incidents: tuple[IncidentRecord, ...]
    rosters: tuple[Roster, ...] = ()  # read only of a job that was requeued


def read_jobs(
    state_dir: Path, owners: Mapping[int, int] | None = None, most: int = MAX_JOBS
) -> tuple[list[JobRecord], list[str]]:
    """Reports and incidents of the newest jobs, newest first, and what could not be read."""
    problems: list[str] = []
    found: list[JobRecord] = []
    budgets = RecordBudgets()
    for job, directory in job_dirs(state_dir, problems, owners, most):
        budget = budgets.of(directory)
        incidents, wrong = read_incidents(directory, budget)
        uid = names.owner(str(directory))
        problems += wrong
        rosters = (
            read_rosters(job, directory, problems, budget)
            if any(one.outcome == "requeued" for one in incidents)
            else []
        )
        found.append(
            JobRecord(
                job,
                -1 if uid is None else uid,
                tuple(_node_reports(directory, problems, budget)),
                tuple(incidents),
                tuple(rosters),
            )
        )
    return sorted(found, key=lambda one: -one.job_id), problems


def _withdrawals(job_dir: Path, problems: list[str], budget: RecordBudget) -> list[NodeReport]:
    """Return the withdrawals of reports; malformed ones are listed by ``_node_reports``."""
    found = []
    for path in _listed(job_dir / "accusations", "", MAX_REPORTS, problems, budget, WITHDRAWN):
        raw = content(path, REPORT_BYTES, problems, budget=budget)
        if raw is not None and (one := node_report_from(decode(raw))) is not None:
            found.append(one)
    return found


def _listed(
    directory: Path,
    prefix: str,
    most: int,
    problems: list[str],
    budget: RecordBudget,
    end: str = ".json",
) -> list[Path]:
    if budget.over(directory, problems):
        return []
    try:
        with os.scandir(directory) as entries:
            listed = [entry.name for entry in islice(entries, MAX_NAMES)]
        budget.spend(files=1, objects=len(listed))
        names = sorted(
            name
            for name in listed
            if name.startswith(prefix) and not name.startswith(".") and name.endswith(end)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        problems.append(f"cannot read {directory}: {error.strerror or error}")
        return []
    if len(names) > most:
        problems.append(f"{directory}: {len(names) - most} of {len(names)} files were not read")
    return [directory / name for name in names[-most:]]


def content(
    path: Path,
    limit: int,
    problems: list[str],
    tail: bool = False,
    budget: RecordBudget | None = None,
) -> bytes | None:
    """Return what ``read_capped`` does; None for a file that is not there or beyond the budget, and
    for one that cannot be read, which adds a line to ``problems``."""
    if budget is not None and budget.over(path, problems):
        return None
    try:
        raw = read_capped(path, limit, tail)
        if budget is not None:
            budget.spend(len(raw), files=1)
        return raw
    except FileNotFoundError:  # never written, or removed since it was listed
        return None
    except OSError as error:
        problems.append(f"cannot read {clean(str(path))}: {clean(error.strerror or str(error))}")
        return None


def log_of(job_dir: Path | None) -> str:
    """The path of robust-srun's log of a job; "" if there is none."""
    if job_dir is None:
        return ""
    try:
        found = stat.S_ISREG((job_dir / names.LOG).lstat().st_mode)
    except OSError:
        return ""
    return clean(str(job_dir / names.LOG)) if found else ""


def read_incidents(
    job_dir: Path | None, budget: RecordBudget | None = None
) -> tuple[list[IncidentRecord], list[str]]:
    """A job's incidents as amended by withdrawals, oldest first, and problems with their files."""
    if job_dir is None:
        return [], []
    budget = budget or RecordBudget()
    path = job_dir / "incidents.jsonl"
    problems: list[str] = []
    raw = content(path, INCIDENTS_BYTES, problems, tail=True, budget=budget)
    if raw is None:
        return [], problems
    lines = raw.split(b"\n")  # the last one is empty, or torn
    if len(lines) > MAX_INCIDENTS + 1:
        problems.append(f"{path}: only the newest {MAX_INCIDENTS} incidents were read")
        raw = b"\n".join(lines[-MAX_INCIDENTS - 1 :])
    found, bad, torn = incidents_from(raw)
    budget.spend(objects=4 * len(found))
    if bad:
        problems.append(f"{path}: {bad} unreadable lines skipped")
    if torn:
        problems.append(f"{path}: torn last line skipped")
    return amend(found, _withdrawals(job_dir, problems, budget)), problems
