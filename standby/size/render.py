"""``robust-standby size`` for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robust_slurm.command_line.screen import plain_table
from robust_slurm.text import counted
from standby.size.answer import ESTIMATE, GIVEN, PoolSize, SizeCase
from standby.size.observed import Observed, Rate


def print_answer(found: PoolSize, out: Console) -> None:
    """Print what was measured, what is lost, what pools are worth, and the number last."""
    if found.measured is not None:
        _measured(found.measured, out)
        out.print()
    table = plain_table(
        "LOST AT ONCE", "PER 1,000 NODE-DAYS", "ONCE IN", "UNITS", "P OF EACH", texts=1
    )
    for case in found.cases:
        for cause in case.causes:
            what = counted(cause.size, "node")
            if case.name not in (GIVEN, ESTIMATE):
                what += f", {case.name}"
            often = "never" if cause.days is None else _time(cause.days)
            table.add_row(what, f"{cause.per_1000:.3g}", often, str(cause.units), f"{cause.p:.3g}")
    out.print(table)
    out.print(
        f"p: probability that a unit is lost within the refill time, {found.refill_hours:g} h"
    )
    out.print()
    table = plain_table(
        "POOL FOR", "STANDBYS", "P(SHORTAGE)", "MEAN SHORTFALL", "SHORT BY, IF SHORT", texts=1
    )
    for case in found.cases:
        _pools(case, table)
    out.print(table)
    out.print()
    for note in found.notes:
        out.print(Text(f"note: {note}", style="yellow"))
    out.print(Text(_verdict(found), style="bold"))


def _pools(case: SizeCase, table: Table) -> None:
    many = len(case.causes) > 1
    rows = [("single nodes alone", case.single)] if many else []
    rows.append(("all losses" if many else "single nodes", case.all))
    for name, pool in rows:
        if case.name != GIVEN:
            name += f", {case.name}"
        table.add_row(
            name,
            str(pool.standbys),
            _percent(pool.shortage),
            f"{pool.shortfall:.2g} nodes",
            f"{pool.short_by:.1f} nodes" if pool.shortage else "",
        )


def _verdict(found: PoolSize) -> str:
    first, *more = found.cases
    text = f"{counted(found.nodes, 'node')}: keep {counted(first.all.standbys, 'standby')}"
    for case in more:
        text += f"; {case.all.standbys} if the rate is at the {case.name}"
    return f"{text} (enough with probability {found.quantile:g})"


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
    out.print(_rate("single nodes", seen.single))
    sizes = ", ".join(f"{n} x {size}" for size, n in sorted(seen.sizes.items()) if size > 1)
    found = f"; events x nodes: {sizes}" if sizes else ""
    out.print(_rate("several nodes at once", seen.several) + found)
    for problem in seen.problems:
        out.print(Text(f"note: {problem}", style="yellow"))


def _rate(what: str, rate: Rate) -> str:
    return (
        f"{what}: {counted(rate.events, 'event')}, {1000 * rate.estimate:.3g} per 1,000 node-days, "
        f"95 % interval {1000 * rate.low:.3g} to {1000 * rate.high:.3g}"
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _time(days: float) -> str:
    if days < 2.0:
        return f"{24 * days:.3g} h"
    return f"{days:.3g} days" if days < 1000.0 else f"{days / 365.0:,.0f} years"


def _date(when: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(when))
