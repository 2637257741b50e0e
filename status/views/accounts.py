"""Accounts as tables for a terminal. Imports rich, so it is imported only to print one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robust_slurm.command_line.screen import plain_table
from robust_slurm.text import counted
from status.accounts.sums import SHARES, LostTime, Total, curve, ettr, hours, lost, total
from status.accounts.sums import unproductive as unproductive_of
from status.accounts.timeline import JobAccount
from status.accounts.weeks import Week, day
from status.views.overview import duration
from status.wording import about

MOST = 10  # rows of each breakdown on the screen; --json has all
TEXT = 16  # columns of a name from which it folds
_TEXTS = ("JOB", "NAME", "USER")
_LESS = (
    "NAME",
    "USER",
    "GPUS",
    "LAST HOUR",
    "LOST",
    "INCIDENTS",
)  # left out where there is no room
_NAMES = {"first_step": "first step", "start_up": "start-up"}


def print_accounts(
    accounts: Sequence[JobAccount],
    weeks: Sequence[Week] | None,
    problems: Sequence[str],
    error: str,
    out: Console,
) -> None:
    """Print the sum, each job, and where the lost GPU-hours went; or (``weeks``) each week."""
    if error:
        out.print(Text(f"Slurm did not answer, only files are counted: {error}", style="red"))
    if accounts:
        out.print(headline(total(accounts)))
        out.print()
        if weeks is None:
            out.print(_jobs(accounts, out.width))
            for name, share in SHARES.items():
                if rows := lost(accounts, share):
                    out.print()
                    out.print(_lost(name, rows))
        else:
            out.print(_weeks(weeks))
    elif not problems:
        out.print("No job of robust-srun is recorded in this time.")
    for one in accounts:
        for note in one.notes:
            out.print(Text(f"note: job {one.job_id}: {note}", style="yellow"))
    for problem in problems:
        out.print(Text(f"note: {problem}", style="yellow"))


def headline(of: Total) -> str:
    """Like "3 jobs, 9 incidents: 7031.5 GPU-hours, 30.3 of them lost; ETTR 0.9957"."""
    jobs, hits = counted(of.jobs, "job"), counted(of.incidents, "incident")
    gpu, gone = hours(of.gpu_ms), hours(of.lost_gpu_ms)
    share = "?" if of.ettr is None else f"{of.ettr:.4f}"
    return f"{jobs}, {hits}: {gpu:.1f} GPU-hours, {gone:.1f} of them lost; ETTR {share}"


def _jobs(accounts: Sequence[JobAccount], width: int) -> Table:
    heads = (*_TEXTS, "GPUS", "INCIDENTS", "ELAPSED", "LOST", "LOST GPU-H", "ETTR", "LAST HOUR")
    rows = [_cells(one) for one in accounts]
    shown = _fitting(heads, rows, width)
    table = plain_table()
    for head in (heads[n] for n in shown):
        side: Any = "left" if head in _TEXTS else "right"
        table.add_column(head, justify=side, no_wrap=head not in _LESS[:2], overflow="fold")
    for row in rows:
        table.add_row(*(row[n] for n in shown))
    return table


def _cells(one: JobAccount) -> tuple[str, ...]:
    at = curve(one, points=1)
    share, gone = ettr(one), sum(s.gpu_ms for s in one.segments if not s.productive)
    return (
        str(one.job_id),
        one.name,
        one.user,
        str(one.gpus),
        str(total([one]).incidents),
        duration(one.elapsed / 1000),
        about(duration(unproductive_of(one) / 1000), one.estimated),
        about(f"{hours(gone):.2f}", one.estimated),
        "?" if share is None else about(f"{share:.4f}", one.estimated),
        f"{at.sliding[-1]:.4f}" if at.sliding and one.live else "",
    )


def _fitting(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """The columns to show; texts fold at TEXT columns."""
    sizes = [max(len(head), *(len(row[n]) for row in rows)) for n, head in enumerate(heads)]
    sizes = [min(size, TEXT) if heads[n] in _TEXTS else size for n, size in enumerate(sizes)]
    shown = list(range(len(heads)))
    for head in _LESS:
        if sum(sizes[n] for n in shown) + 2 * (len(shown) - 1) <= width:
            break
        shown.remove(heads.index(head))
    return shown


def _lost(name: str, rows: Sequence[LostTime]) -> Table:
    table = plain_table(f"LOST BY {name.upper()}")
    for head in ("TIME", "GPU-HOURS", "INCIDENTS"):
        table.add_column(head, justify="right", no_wrap=True)
    shown = rows if len(rows) <= MOST else rows[: MOST - 1]
    for row in shown:
        told = (duration(row.ms / 1000), f"{row.gpu_hours:.2f}", str(row.incidents or ""))
        table.add_row(_NAMES.get(row.name, row.name), *told)
    if rest := rows[len(shown) :]:
        times, gpu = sum(r.ms for r in rest) / 1000, hours(sum(r.gpu_ms for r in rest))
        table.add_row(f"and {len(rest)} more", duration(times), f"{gpu:.2f}", "")
    return table


def _weeks(weeks: Sequence[Week]) -> Table:
    table = plain_table("WEEK OF")
    for head in ("JOBS", "INCIDENTS", "GPU-HOURS", "LOST", "ETTR"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("LOST BY CAUSE (GPU-HOURS)")
    for week in weeks:
        of = week.total
        causes = ", ".join(f"{row.name} {row.gpu_hours:.2f}" for row in week.causes[:5])
        table.add_row(
            day(week.begin),
            str(of.jobs),
            str(of.incidents),
            f"{hours(of.gpu_ms):.1f}",
            f"{hours(of.lost_gpu_ms):.2f}",
            "?" if of.ettr is None else f"{of.ettr:.4f}",
            causes,
        )
    return table
