"""Reads all jobs or one, and has a view print them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from typing import IO, Any

from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.state_dir.files import StateFiles, log_of, read_incidents, read_state
from robust_slurm.state_dir.progress import JobRun, read_progress
from robust_slurm.state_dir.records import NodeReport, clean
from standby.pool.stock import read_pool
from status.accounts.gather import read_histories, with_spans
from status.accounts.timeline import JobAccount, account
from status.model import JobReport, SlurmView, StatusReport, job_report, job_row, report
from status.source import RecordSource, ask_slurm
from status.views.attention import Attention, attention

JSON_VERSION = 1


@dataclass(frozen=True)
class Cluster:
    """The report of all jobs and nodes, the reports against nodes, and what needs attention."""

    report: StatusReport
    reports: tuple[NodeReport, ...]
    look: tuple[Attention, ...]
    wrong: bool  # there is no such state directory, or it cannot be read

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self.report), "attention": [asdict(one) for one in self.look]}


def read_cluster(source: RecordSource, mine: bool = False, since: float | None = None) -> Cluster:
    """Read all jobs and nodes.

    ``mine``: only the reader's jobs; ``since``: also ended jobs that have reported since then.
    """
    pool, wrong = read_pool(source.state_dir)
    view = ask_slurm(source.door, with_places=pool is not None)
    known = {"nodes": len(view.nodes)} if view.nodes else {}
    files = read_state(source.state_dir, view.owners, **known)
    missing = source.missing()
    problems = [*([missing] if missing else []), *files.problems, *([wrong] if wrong else [])]
    now = source.now
    args = files.rosters, files.reports, problems, view, source.standby_partition, now, pool
    done = report(*args)
    rows = list(done.jobs)
    if since is not None:
        ended = [job_row(r, view, now) for r in files.rosters if r.updated >= since]
        rows += sorted((r for r in ended if not r.live), key=lambda r: (-r.job_id, r.step_id))
    if mine:
        rows = [row for row in rows if row.user == source.own]
    done = replace(done, jobs=tuple(rows))
    look = attention(done, files.reports)
    return Cluster(done, tuple(files.reports), tuple(look), source.wrong)


def show_all(args: argparse.Namespace, source: RecordSource, out: IO[str]) -> int:
    """Print the screen, the table of nodes (--nodes), or that of the bad ones (--bad)."""
    found = read_cluster(source, args.mine, moment(args.since, source.now))
    if args.json:
        print_json(found.as_json(), out)
    else:
        from robust_slurm.command_line.screen import console
        from status import render

        to = console(out)
        if args.nodes:
            render.print_report(found.report, to)
        elif args.bad:
            render.print_bad(found.report, found.look, to)
        else:
            render.print_overview(found.report, found.look, to)
    return 1 if found.report.slurm_error or found.wrong else 0


def moment(since: float | None, now: float) -> float | None:
    """The time that --since means: a negative number counts from now."""
    return since if since is None or since >= 0 else now + since


@dataclass(frozen=True)
class OneJob:
    """A job's report and the account of its time (None: nothing says when it ran)."""

    report: JobReport
    account: JobAccount | None
    runs: tuple[JobRun, ...] = ()

    @property
    def recovering(self) -> bool:
        return any(row.status == "recovering" for row in self.report.steps)


class NoRecordError(CommandError):
    """No record of this job exists."""


def read_job(
    job_id: int, source: RecordSource, with_account: bool, view: SlurmView | None = None
) -> OneJob:
    """Read a job. Raises NoRecordError, after lines on stderr, if nothing is recorded of it.

    ``view``: what Slurm says, if it has just been asked.
    """
    if view is None:
        view = ask_slurm(source.door, with_nodes=False)
    files: StateFiles = read_state(source.state_dir, view.owners, job_id)
    incidents, problems = read_incidents(files.directory)
    problems = [*files.problems, *problems]
    if not files.rosters and not incidents:
        where = clean(str(source.state_dir / "jobs"))
        for problem in problems:
            warn("robust-status", problem)
        raise NoRecordError(
            f"no record of job {job_id} under {where}; was it started by robust-srun, with this "
            "state_dir?"
        )
    now = source.now
    done = job_report(
        job_id, files.rosters, incidents, problems, view, now, log_of(files.directory)
    )
    if not with_account:
        return OneJob(done, None)
    accounts, _ = read_accounts(source, view, job_id)
    runs, _ = read_progress(files.directory)
    return OneJob(done, accounts[0] if accounts else None, tuple(runs))


def read_accounts(
    source: RecordSource, view: SlurmView, only: int | None = None
) -> tuple[list[JobAccount], list[str]]:
    """The accounts of all jobs, newest first, or of one; and what could not be read."""
    now = source.now
    found, problems = read_histories(source.state_dir, view, now, only, source.user)
    if found and not view.error:
        found, why = with_spans(found, source.door)
        problems += [why] if why else []
    return [account(one, now) for one in found], problems


def show_job(args: argparse.Namespace, source: RecordSource, out: IO[str]) -> int:
    """Print a job with its incidents, or why it was restarted (--why)."""
    with_account = args.why or args.json
    found = read_job(args.subject, source, with_account)
    done = found.report
    told: list[str] = []
    if with_account:
        from status.views.why import paragraphs

        of = found.account
        if of is None:
            told = [f"No record shows when job {args.subject} ran."]
        else:
            told = paragraphs(of, done.log, found.recovering)
    if args.json:
        print_json({**asdict(done), "why": told}, out)
    elif args.why:
        from robust_slurm.command_line.screen import console
        from status.render import print_paragraphs

        print_paragraphs(told, done, console(out))
    else:
        from robust_slurm.command_line.screen import console
        from status.render import print_job

        print_job(done, console(out))
    return 1 if done.slurm_error else 0


def print_json(data: dict[str, Any], out: IO[str]) -> None:
    json.dump({"version": JSON_VERSION, **data}, out, indent=1, allow_nan=False)
    out.write("\n")
