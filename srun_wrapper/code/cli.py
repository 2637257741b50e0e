"""``robust-update JOB``: exit 0 (done), 1 (not in force, or no answer), 2 (bad input)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

from robust_slurm.command_line import BAD_INPUT, NO, OK
from robust_slurm.command_line.errors import CommandError, warn
from robust_slurm.command_line.parser import Parser
from robust_slurm.command_line.run import run
from robust_slurm.config import ConfigError, load
from robust_slurm.state_dir import job_dirs
from robust_slurm.text import one_line
from srun_wrapper.code import prune, requests, show
from srun_wrapper.code.deployment import BOOK, REQUESTS, read_book
from srun_wrapper.code.listing import CodeError
from srun_wrapper.code.snapshot import Asked, take
from srun_wrapper.code.start import me
from srun_wrapper.code.versions import Book, Change, Version

HEARD = 20.0  # s for robust-srun to take a request in
LOOK = 0.05  # s between two looks for its answer


class _Wrong(Exception):
    """Bad input; the text says what to do."""


@dataclass(frozen=True)
class _Job:
    id: int
    records: Path
    book: Book


def build_parser() -> Parser:
    parser = Parser(
        prog="robust-update",
        description="Replace the code of a running job that robust-srun --robust-code started: "
        "take a snapshot of its directory now, and restart the ranks with it in the same "
        "allocation.",
    )
    parser.add_argument("job", type=_job_id, metavar="JOB", help="the job's id")
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--now", action="store_true", help="restart the ranks now (default)")
    when.add_argument(
        "--lazy",
        action="store_true",
        help="restart nothing: apply the update at the next recovery, in 24 h at most",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--rollback",
        action="store_true",
        help="go back to the last version that made progress, instead of taking a snapshot",
    )
    what.add_argument("--cancel", action="store_true", help="cancel the update that waits")
    what.add_argument("--list", action="store_true", help="print all changes, and change nothing")
    parser.add_argument("--why", default="", metavar="TEXT", help="the reason, for the record")
    parser.add_argument(
        "--wait",
        type=_seconds,
        default=600.0,
        metavar="SECONDS",
        help="time to wait until the ranks make a step with it; 0: do not wait (default: 600)",
    )
    parser.json_option()
    parser.add_argument(
        "--state-dir",
        metavar="DIR",
        help="directory of the jobs' records (default: state_dir of robust.toml)",
    )
    # srun's users try it: named, so that the answer is one line.
    parser.add_argument("-M", "--clusters", metavar="NAMES", help=argparse.SUPPRESS)
    return parser


def _job_id(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 0 < int(text[:11]) < 1 << 32:
        raise argparse.ArgumentTypeError(f"not a job id: {text[:40]!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):  # nan is neither
        raise argparse.ArgumentTypeError(f"not a number of seconds: {text[:40]!r}")
    return seconds


def main(argv: Sequence[str] | None = None) -> int:
    wrong = (_Wrong, ConfigError, CodeError)
    stays = "not waited for; the request stays (robust-update --list shows it)"
    return run(
        build_parser(),
        argv,
        _update,
        codes=dict.fromkeys(wrong, BAD_INPUT),
        unread=NO,
        interrupted=stays,
    )


def _update(args: argparse.Namespace, out: IO[str]) -> int:
    if args.clusters is not None:
        raise _Wrong("-M: a job is found by its records; --state-dir names its cluster's state_dir")
    if args.lazy and (args.rollback or args.cancel or args.list):
        raise _Wrong("--lazy goes with an update alone")
    try:
        job = _find(args.job, args.state_dir)
        if args.list:
            out.write(json.dumps(show.record(job.book)) if args.json else show.listed(job.book))
            out.write("\n")
            return OK
        return _request(job, args)
    except OSError as err:
        named = f"{err.filename or 'the records'}: {err.strerror or err}"
        raise CommandError(named, BAD_INPUT) from None


_say = partial(warn, "robust-update")


def _find(job: int, state_dir: str | None) -> _Job:
    """Return the job's own records. Raises _Wrong, ConfigError, OSError."""
    place = Path(state_dir) if state_dir else load(warn=_say).state_dir
    jobs = place / "jobs"
    name = job_dirs.find(str(jobs), job, os.getuid())
    if name is None:
        owner = job_dirs.owner(str(jobs / str(job)))
        if owner is not None:
            raise _Wrong(f"job {job} belongs to uid {owner}: only that user can update its code")
        raise _Wrong(f"no records of job {job} in {jobs}; --state-dir names the job's state_dir")
    book = read_book(jobs / name / BOOK)
    if book is None:
        raise _Wrong(
            f"job {job} has no code to update: start it with robust-srun --robust-code=DIR"
        )
    return _Job(job, jobs / name, book)


# -- a request


def _request(job: _Job, args: argparse.Namespace) -> int:
    began = time.monotonic()
    user, host = me()
    why = one_line(args.why, 500)
    change = Change(secrets.token_hex(4), "now", "", user, host, why, time.time())
    if args.cancel:
        waiting = job.book.waiting()
        if waiting is None:
            raise CommandError(f"job {job.id}: no update waits")
        change.version = waiting.version
        requests.send(job.records / REQUESTS, requests.Request("cancel", change))
        return _answered(job, waiting.id, args, began)
    version = None
    if args.rollback:
        change.version, change.kind = _back(job.book), "rollback"
    else:
        version = _snapshot(job.book)
        change.version, change.kind = version.id, "lazy" if args.lazy else "now"
        if version.id == job.book.current and job.book.waiting() is None:
            _say(f"job {job.id}: code {version.id} is in force already; nothing to do")
            if args.json:
                _print(job, version.id, "in force", "nothing to do", 0.0)
            return OK
    requests.send(job.records / REQUESTS, requests.Request("change", change, version))
    with contextlib.suppress(ConfigError):
        config = replace(load(), state_dir=job.records.parent.parent)
        prune.begin(config, Path(job.book.store), job.records)
    return _answered(job, change.id, args, began)


def _back(book: Book) -> str:
    back = book.back()
    if not back:
        raise _Wrong("no earlier version has made progress: there is nothing to go back to")
    return back


def _snapshot(book: Book) -> Version:
    asked = Asked(book.source, book.store, book.exclude, book.limit, book.current)
    version, line = take(asked)
    _say(line)
    return version


def _answered(job: _Job, change_id: str, args: argparse.Namespace, began: float) -> int:
    """Wait for what becomes of the request; the exit code."""
    heard = False
    while True:
        book = read_book(job.records / BOOK) or job.book
        change = next((c for c in book.changes if c.id == change_id), None)
        waited = time.monotonic() - began
        if change is not None:
            if not heard and change.state == "waiting" and not args.cancel:
                heard = True
                when = "the next recovery, in 24 h at most" if args.lazy else "now"
                _say(f"job {job.id}: code {change.version} is to be applied: {when}")
            done = show.ended(change)
            if args.cancel and change.state == "cancelled":
                done = (f"code {change.version} is {change.outcome}", 0)
            if done is None and heard and (args.lazy or not args.wait):
                done = (f"code {change.version} waits", 0)
            if done is not None:
                return _end(job, change, done, args, waited)
        if not book.running or (change is None and waited > HEARD):
            why = "does not answer" if book.running else "has ended"
            later = "the update is applied if the job runs again (see robust-status)"
            raise CommandError(f"job {job.id}: its robust-srun {why}; {later}")
        if waited > max(args.wait, HEARD):
            raise CommandError(
                f"job {job.id}: no step was seen in {waited:.0f} s; see robust-status {job.id}"
            )
        time.sleep(LOOK)


def _end(
    job: _Job, change: Change, done: tuple[str, int], args: argparse.Namespace, waited: float
) -> int:
    text, code = done
    if args.json:
        _print(job, change.version, change.state, change.outcome, waited)
    else:
        _say(f"job {job.id}: {text}")
    return code


def _print(job: _Job, version: str, state: str, outcome: str, waited: float) -> None:
    fields = {"job": job.id, "version": version, "state": state}
    print(json.dumps({**fields, "outcome": outcome, "seconds": round(waited, 3)}))


if __name__ == "__main__":
    sys.exit(main())
