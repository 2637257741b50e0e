"""``robust-standby size`` for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from robust_slurm.command_line.screen import plain_table
from robust_slurm.text import counted
from standby.size.answer import PoolSize
from standby.size.observed import Observed


def print_answer(found: PoolSize, out: Console) -> None:
    """Print what was measured, what is lost and how often, and the number last."""
    if found.measured is not None:
        _measured(found.measured, out)
        out.print()
    head = (
        "LOST AT ONCE",
        "PER 1,000 NODE-DAYS",
        "ONCE IN",
        "UNITS",
        "P OF EACH",
        "STANDBYS FOR IT",
    )
    table = plain_table(*head, texts=1)
    for cause in found.causes:
        what = counted(cause.size, "node")
        often = "never" if cause.days is None else _time(cause.days)
        numbers = (f"{cause.per_1000:.3g}", often, str(cause.units), f"{cause.p:.3g}")
        table.add_row(what, *numbers, str(cause.standbys))
    out.print(table)
    out.print(
        f"p: probability that a unit is lost within the refill time, {found.refill_hours:g} h"
    )
    out.print()
    for note in found.notes:
        out.print(Text(f"note: {note}", style="yellow"))
    keep = f"{counted(found.nodes, 'node')}: keep {counted(found.standbys, 'standby')}"
    out.print(Text(f"{keep} (enough with probability {found.quantile:g})", style="bold"))


def _measured(seen: Observed, out: Console) -> None:
    where = f"{counted(seen.nodes, 'node')} in {counted(seen.jobs, 'job')}"
    if seen.given:
        where = "as given"
    if seen.begin is not None and seen.end is not None:
        where += f", {_date(seen.begin)} to {_date(seen.end)}"
    out.print(f"watched: {seen.node_days:,.1f} node-days ({where})")
    out.print(
        f"counted: {counted(seen.incidents, 'incident')} that cost a node, "
        f"{counted(seen.drains, 'drain')} by the gate"
    )
    if seen.left_out:
        out.print(f"left out: {seen.left_out} losses of nodes at times that no job's records cover")
    for problem in seen.problems:
        out.print(Text(f"note: {problem}", style="yellow"))


def _time(days: float) -> str:
    if days < 2.0:
        return f"{24 * days:.3g} h"
    return f"{days:.3g} days" if days < 1000.0 else f"{days / 365.0:,.0f} years"


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(when))
