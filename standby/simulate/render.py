"""``robust-standby simulate`` for a terminal. Imports rich, so it is imported only to print."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from standby.simulate.study import Study, gpu_hours


def print_study(found: Study, gpus: int, out: Console) -> None:
    """Print the approaches, the pools, what costs most, and what is assumed."""
    cluster = found.cluster
    out.print(
        f"{cluster.nodes:,} nodes ({cluster.nodes * gpus:,} GPUs), {cluster.days:g} days, "
        f"{found.faults:.0f} faults; {found.runs} runs with other random numbers"
    )
    out.print(f"mix: {found.mix}")
    out.print(
        f"{cluster.pool} standby nodes, refilled in {cluster.refill_h:g} h; "
        f"a step takes {cluster.step_s:g} s"
    )
    out.print()
    table = _table("APPROACH", "ETTR %", "OF ALL RUNS", "MIN/FAULT", "WORST HOUR", "POOL SHORT")
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
    for row in found.rows:
        out.print(f"{row.name}: {row.what}")
    out.print()
    table = _table("STANDBY NODES, OURS", *map(str, found.pools))
    table.add_row("ETTR %", *(f"{100 * ettr:.2f}" for ettr in found.pools.values()))
    out.print(table)
    out.print()
    for heading, parts in (("OURS, BY CAUSE", found.causes), ("OURS, BY PHASE", found.phases)):
        table = _table(heading, "GPU-HOURS LOST", "OF THE LOSS")
        total = sum(parts.values()) or 1.0
        for name, seconds in parts.items():
            if seconds >= 0.005 * total:
                hours = f"{gpu_hours(seconds, cluster, gpus):,.0f}"
                table.add_row(name, hours, f"{100 * seconds / total:.0f} %")
        out.print(table)
        out.print()
    out.print(Text("Assumed or published, not measured by us:", style="bold"))
    for line in found.assumed:
        out.print(f"- {line}")
    out.print()
    phase = next(iter(found.phases), "nothing")
    best = found.rows[0]
    out.print(
        Text(
            f"ours: ETTR {100 * best.ettr:.2f} %; the phase that costs most is {phase}",
            style="bold",
        )
    )


def _table(*headings: str) -> Table:
    """A table whose first column holds text."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    return table
