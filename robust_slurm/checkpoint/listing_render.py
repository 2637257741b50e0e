"""``robust-ckpt``'s tables for a terminal. Imports rich, so it is imported only to print one."""

from __future__ import annotations

import time

from rich.console import Console
from rich.table import Table
from rich.text import Text

from robust_slurm.text import one_line

from .durable.marks import DOUBTED
from .listing import COMMITTED, COMPLETE, DAMAGED, Checked, Listing

_STYLE = {COMMITTED: "green", COMPLETE: "green", DAMAGED: "bold red"}
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")

_LONGEST = 4096  # characters of a path or a note


def print_listing(found: Listing, out: Console) -> None:
    """Print the steps, newest last, then the snapshot files."""
    if not found.steps and not found.files:
        out.print(f"No checkpoints in {one_line(found.directory, _LONGEST)}.")
    if found.steps:
        head = ("STEP", "STATE", "SAVED", "RANKS", "MESH", "SIZE", "RUN", "CERTIFIED", "NOTE")
        table = _table(*head)
        for row in found.steps:
            table.add_row(
                str(row.step),
                _state(row.state),
                _when(row.time),
                _number(row.world),
                " x ".join(f"{one_line(k, _LONGEST)} {v}" for k, v in row.mesh.items()),
                _size(row.bytes),
                one_line(row.attempt, _LONGEST),
                Text(row.mark, "yellow" if row.mark == DOUBTED else "green"),
                one_line(row.note, _LONGEST),
            )
        out.print(table)
        good = [row.step for row in found.steps if row.state == COMMITTED]
        sure = [row.step for row in found.steps if row.mark not in ("", DOUBTED)]
        tail = f", newest certified: step {max(sure)}" if sure else ""
        out.print(f"newest committed: step {max(good)}{tail}" if good else "none is committed")
    if found.files:
        table = _table("FILE", "STATE", "STEP", "RANK", "RANKS", "EPOCH", "JOB", "SIZE", "NOTE")
        for file in found.files:
            table.add_row(
                one_line(file.path.rpartition("/")[2], _LONGEST),
                _state(file.state),
                _number(file.step),
                _number(file.rank),
                _number(file.world),
                _number(file.epoch),
                one_line(file.job, _LONGEST),
                _size(file.bytes),
                one_line(file.note, _LONGEST),
            )
        out.print(table)


def print_checked(results: list[Checked], out: Console) -> None:
    """Print one line for each result, and one for each of its problems."""
    for each in results:
        word = Text("good", "green") if each.good else Text("BAD ", "bold red")
        if each.good and each.note:
            word = Text("?   ", "yellow")
        rate = f"{_size(each.bytes)}, {each.seconds:.1f} s"
        line = Text.assemble(word, f"  {one_line(each.path, _LONGEST)}  {rate}")
        out.print(line, soft_wrap=True)
        if each.note:
            out.print(f"      {one_line(each.note, _LONGEST)}", soft_wrap=True)
        for problem in each.problems[:20]:
            out.print(f"      {one_line(problem.what, _LONGEST)}", soft_wrap=True)
        if len(each.problems) > 20:
            out.print(f"      and {len(each.problems) - 20} more (--json shows all)")


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        right = heading in ("STEP", "RANK", "RANKS", "EPOCH", "SIZE")
        table.add_column(heading, justify="right" if right else "left", no_wrap=heading == "STEP")
    return table


def _state(state: str) -> Text:
    return Text(state, style=_STYLE.get(state, "yellow"))


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _when(seconds: float | None) -> str:
    if seconds is None:
        return ""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "?"


def _size(count: int) -> str:
    size, unit = float(count), 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"
