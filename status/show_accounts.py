"""``robust-status --accounts``: tables, a row per week, CSV and JSON."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from typing import IO, Any

from status.accounts.segments import PHASES
from status.accounts.sums import SHARES, LostTime, Total, curve, ettr, hours, lost, since, total
from status.accounts.sums import unproductive as unproductive_of
from status.accounts.timeline import JobAccount, ms
from status.accounts.weeks import Week, day, weekly
from status.show import moment, print_json, read_accounts
from status.source import RecordSource, ask_slurm

_RISKY = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet takes such a text for a formula


def show_accounts(args: argparse.Namespace, source: RecordSource, out: IO[str]) -> int:
    """Print the accounts of all jobs, or of one; return the exit code."""
    view = ask_slurm(source.door, with_nodes=False)
    accounts, problems = read_accounts(source, view, args.subject)
    missing = source.missing()
    problems = [*([missing] if missing else []), *problems]
    if args.subject is not None and not accounts and not missing:
        problems.append(f"no record of job {args.subject} says when it ran")
    if args.mine:
        accounts = [one for one in accounts if one.user == source.own]
    begin = moment(args.since, source.now)
    if begin is not None:
        cut = [since(one, ms(begin), ms(source.now)) for one in accounts]
        accounts = [one for one in cut if one is not None]
    weeks = weekly(accounts) if args.weekly else []
    if args.csv:
        _print_csv(accounts, weeks, args.weekly, out)
    elif args.json:
        print_json(as_json(accounts, weeks, problems, view.error, source.now), out)
    else:
        from robust_slurm.command_line.screen import console
        from status.views.accounts import print_accounts

        print_accounts(accounts, weeks if args.weekly else None, problems, view.error, console(out))
    failed = bool(view.error or source.wrong) or (args.subject is not None and not accounts)
    return 1 if failed else 0


def as_json(
    accounts: Sequence[JobAccount],
    weeks: Sequence[Week],
    problems: Sequence[str],
    error: str,
    now: float,
) -> dict[str, Any]:
    """The accounts as JSON; see docs/robust-status.md."""
    return {
        "time": now,
        "slurm_error": error,
        "total": _total(total(accounts)),
        "jobs": [_job(one) for one in accounts],
        **{f"by_{name}": [_lost(row) for row in lost(accounts, by)] for name, by in SHARES.items()},
        "weeks": [
            {"begin": w.begin / 1000, **_total(w.total), "by_cause": [_lost(r) for r in w.causes]}
            for w in weeks
        ],
        "problems": list(problems),
    }


def _job(one: JobAccount) -> dict[str, Any]:
    shown = curve(one, points=1)
    return {
        "job_id": one.job_id,
        "name": one.name,
        "user": one.user,
        "partition": one.partition,
        "gpus": one.gpus,
        "begin": one.begin / 1000,
        "end": one.end / 1000,
        "live": one.live,
        "elapsed_s": one.elapsed / 1000,
        "unproductive_s": unproductive_of(one) / 1000,
        "ettr": ettr(one),
        "estimated": one.estimated,
        "ettr_last_hour": shown.sliding[-1] if shown.sliding else None,
        "incidents": total([one]).incidents,
        "by_phase": [_lost(row) for row in lost([one], SHARES["phase"])],
        "by_cause": [_lost(row) for row in lost([one], SHARES["cause"])],
        "notes": list(one.notes),
    }


def _total(of: Total) -> dict[str, Any]:
    return {
        "jobs": of.jobs,
        "incidents": of.incidents,
        "elapsed_s": of.elapsed / 1000,
        "unproductive_s": of.unproductive / 1000,
        "gpu_hours": hours(of.gpu_ms),
        "lost_gpu_hours": hours(of.lost_gpu_ms),
        "ettr": of.ettr,
    }


def _lost(row: LostTime) -> dict[str, Any]:
    seconds, gpu_hours = row.ms / 1000, row.gpu_hours
    return {
        "name": row.name, "seconds": seconds, "gpu_hours": gpu_hours, "incidents": row.incidents,
    }  # fmt: skip


# -- CSV --------------------------------------------------------------------------------------

COLUMNS = (
    *("job", "name", "user", "partition", "gpus", "begin", "end", "seconds", "gpu_hours"),
    *("phase", "cause", "symptom", "incident", "nodes"),
)
WEEK_COLUMNS = ("week", "jobs", "incidents", "gpu_hours", "lost_gpu_hours", "ettr", "cause",
                "lost_by_cause_gpu_hours")  # fmt: skip


def _print_csv(
    accounts: Sequence[JobAccount], weeks: Sequence[Week], by_week: bool, out: IO[str]
) -> None:
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(WEEK_COLUMNS if by_week else COLUMNS)
    writer.writerows(_week_rows(weeks) if by_week else _rows(accounts))


def _rows(accounts: Sequence[JobAccount]) -> Iterator[tuple[object, ...]]:
    """A row for each stretch of time, training included: any other sum can be made of them."""
    for job in accounts:
        for one in sorted(job.segments, key=lambda s: (s.begin, PHASES.index(s.phase))):
            incident = job.incidents[one.incident].id if one.incident >= 0 else ""
            about = (job.job_id, safe(job.name), safe(job.user), safe(job.partition), one.gpus)
            spent = (f"{one.begin / 1000:.3f}", f"{one.end / 1000:.3f}", f"{one.ms / 1000:.3f}")
            why = (one.phase, safe(one.cause), safe(one.symptom), safe(incident))
            yield (*about, *spent, f"{hours(one.gpu_ms):.6f}", *why, safe(" ".join(one.nodes)))


def _week_rows(weeks: Sequence[Week]) -> Iterator[tuple[object, ...]]:
    for week in weeks:
        of = week.total
        share = "" if of.ettr is None else f"{of.ettr:.6f}"
        gpu = (f"{hours(of.gpu_ms):.3f}", f"{hours(of.lost_gpu_ms):.3f}")
        about = (day(week.begin), of.jobs, of.incidents, *gpu, share)
        for row in week.causes or (LostTime("", 0, 0, 0),):
            yield (*about, safe(row.name), f"{row.gpu_hours:.6f}")


def safe(text: str) -> str:
    """The text as a cell that no spreadsheet computes."""
    return f"'{text}" if text.startswith(_RISKY) else text
