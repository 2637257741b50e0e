"""``robust-standby simulate`` for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robust_slurm.command_line.screen import plain_table
from standby.simulate.study import Study, gpu_hours


def print_study(found: Study, gpus: int, out: Console) -> None:
    """Print the approaches, the pools, what costs most, and what is assumed."""
    cluster = found.cluster
    out.print(
        f"{_counted(cluster.nodes, 'node')} ({_counted(cluster.nodes * gpus, 'GPU')}), "
        f"{cluster.days:g} days, {found.faults:.0f} faults; "
        f"{_counted(found.runs, 'run')} with other random numbers"
    )
    out.print(f"mix: {found.mix}")
    out.print(
        f"{_counted(cluster.pool, 'standby node')}, refilled in {cluster.refill_h:g} h; "
        f"a step takes {cluster.step_s:g} s"
    )
    out.print()
    table = plain_table(
        "APPROACH", "ETTR %", "OF ALL RUNS", "MIN/FAULT", "WORST HOUR", "POOL SHORT", texts=1
    )
    for row in found.rows:
        span = f"{100 * row.low:.2f}-{100 * row.high:.2f}"
        table.add_row(
            row.name,
            Text(f"{100 * row.ettr:.2f}", style="bold"),
            span,
            f"{row.minutes_per_fault:.1f}",
            f"{100 * row.worst_hour:.0f} %",
            f"{row.shortages:.1f}",
        )
    out.print(table)
    out.print()
    out.print(
        "MIN/FAULT: minutes lost per fault. WORST HOUR: ETTR of a run's worst hour. POOL SHORT: "
        "faults of a run for which there were too few standby nodes."
    )
    out.print(_list((row.name, row.what) for row in found.rows))
    out.print()
    table = plain_table("STANDBY NODES, OURS", *map(str, found.pools), texts=1)
    table.add_row("ETTR %", *(f"{100 * ettr:.2f}" for ettr in found.pools.values()))
    out.print(table)
    out.print()
    curve = ", ".join(f"{day}: {100 * ettr:.2f}" for day, ettr in found.rows[0].curve.items())
    hours = ", ".join(f"{n:.0f} below {percent} %" for percent, n in found.hours.items())
    out.print(f"Ours, ETTR % from the start to day {curve}.")
    out.print(f"Hours of a run by their own ETTR: {hours}.")
    out.print()
    for heading, parts in (("OURS, BY CAUSE", found.causes), ("OURS, BY PHASE", found.phases)):
        table = plain_table(heading, "GPU-HOURS LOST", "OF THE LOSS", texts=1)
        total = sum(parts.values()) or 1.0
        for name, seconds in parts.items():
            if seconds >= 0.005 * total:
                hours = f"{gpu_hours(seconds, cluster, gpus):,.0f}"
                table.add_row(name, hours, f"{100 * seconds / total:.0f} %")
        out.print(table)
        out.print()
    out.print(Text("Assumed or published, in no record of ours:", style="bold"))
    out.print(_list(found.assumed))
    out.print()
    phase = next(iter(found.phases), "nothing")
    best = found.rows[0]
    out.print(
        Text(
            f"ours: ETTR {100 * best.ettr:.2f} %; the phase that costs most is {phase}",
            style="bold",
        )
    )


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _list(rows: Iterable[tuple[str, str]]) -> Table:
    """Return a table of names and their texts; a long text wraps within its column."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for name, text in rows:
        table.add_row(name, text)
    return table
