"""Writes a job's page: ``robust-status JOB --html FILE``. The only file that imports jinja2."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import IO

from robust_slurm.command_line import version
from robust_slurm.command_line.errors import CommandError
from robust_slurm.state_dir.ledger import replace_content
from status.report.page import Page, as_context, page
from status.show import OneJob, print_json, read_job
from status.source import RecordSource

EXTRA = "jinja2 is not installed; install it: pip install 'robust-slurm[report]'"


class ReportError(CommandError):
    """The report cannot be made; the message says why."""


def write_report(
    job_id: int, path: Path, source: RecordSource, out: IO[str], as_json: bool = False
) -> int:
    """Write the page of a job to a file, and print where it is; return the exit code."""
    found = read_job(job_id, source, with_account=True)
    try:
        replace_text(path, rendered(found))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None
    if as_json:
        print_json({"html": str(path)}, out)
    else:
        print(path, file=out)
    return 1 if found.report.slurm_error else 0


def rendered(found: OneJob, refresh_s: int = 0) -> str:
    """Return the page as HTML; the browser reloads it every ``refresh_s`` seconds, if not 0."""
    if found.account is None:
        raise ReportError(f"no record shows when job {found.report.job_id} ran")
    args = found.account, found.report, found.runs, found.recovering, version(), refresh_s > 0
    return html(page(*args), refresh_s)


def html(of: Page, refresh_s: int = 0) -> str:
    """Fill the template; every text in it is escaped."""
    return fill("report.html.j2", {**as_context(of), "refresh_s": refresh_s})


def fill(name: str, context: dict[str, object]) -> str:
    """Fill a template of ours with autoescape. Raises ReportError without jinja2."""
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise ReportError(EXTRA) from None
    where = FileSystemLoader(Path(__file__).parents[2] / "templates")
    engine = Environment(
        loader=where, autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return engine.get_template(name).render(context)


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once, so that no reader sees half of it. Raises OSError.

    /dev/stdout and its like are written to; elsewhere a link is replaced, not followed.
    """
    if path.absolute().parts[1:2] in (("dev",), ("proc",)) and not _is_plain(path):
        with path.open("w", encoding="utf-8") as device:
            device.write(text)
        return
    mask = os.umask(0)
    os.umask(mask)
    replace_content(path, text, 0o666 & ~mask)


def _is_plain(path: Path) -> bool:
    """True for a file that is no link, and for what is not there."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return True
