"""The matrix of Slurm releases and what works on each: ``python -m bench.releases`` (root).

One lab for each release that Debian's archive serves, its root built if needed; in it every cell
of bench/releases/cells.py. Prints the matrix: the time of each cell, or the reason why there is
none. Exit code 1 if a cell went wrong; what does not exist yet, and a release whose root cannot be
built, is a reason and no error.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.common import BenchError, Metric, Results, machine, parser, results_for, summarise
from bench.releases.cells import CELLS, Missing, site
from lab import LabError
from lab.slurm import releases
from lab.slurm.releases import programs_of, version_of

RUNS = 3
WENT_WRONG = (BenchError, LabError, OSError, subprocess.SubprocessError)


class Cell(NamedTuple):
    """A cell's seconds, or the reason why there are none; ``wrong``: there should be some."""

    seconds: Sequence[float] = ()
    reason: str = ""
    wrong: bool = False


Matrix = dict[str, dict[str, Cell]]
"""Cells by release and name."""


def column(release: str, names: Sequence[str], runs: int) -> dict[str, Cell]:
    """Run the cells on one release, each as often as wanted, one after another in one lab."""
    why = releases.why_not(release)
    if why:
        return {name: Cell(reason=why) for name in names}
    found: dict[str, Cell] = {}
    try:
        with site(release) as lab:
            for name in names:
                seconds: list[float] = []
                try:
                    for _ in range(runs):
                        seconds.append(CELLS[name](lab))
                    found[name] = Cell(seconds)
                except Missing as missing:
                    found[name] = Cell(reason=f"{missing}")
                except WENT_WRONG as error:
                    found[name] = Cell(seconds, f"{error}", True)
                tell(f"{release} {name}: {said(found[name])}")
    except WENT_WRONG as error:
        tell(f"{release}: {error}")
        left = {name: Cell(reason=f"{error}", wrong=True) for name in names}
        return left | found
    return found


def said(cell: Cell) -> str:
    """Return the text of a cell: its median, or its reason."""
    return cell.reason or f"{summarise(cell.seconds, 's').median:.1f} s"


def matrix_table(matrix: Matrix, names: Sequence[str]) -> tuple[Table, list[str]]:
    """Return the table, and the reasons that its numbers in brackets stand for."""
    reasons: list[str] = []
    table = Table(title="what works on which release of Slurm")
    table.add_column("")
    for release in matrix:
        table.add_column(release, justify="right")
    for name in names:
        row = []
        for cells in matrix.values():
            cell = cells[name]
            if cell.reason and cell.reason not in reasons:
                reasons.append(cell.reason)
            mark = f"[{reasons.index(cell.reason) + 1}]" if cell.reason else f"● {said(cell)}"
            row.append(f"FAILED {mark}" if cell.wrong else mark)
        table.add_row(name, *(text.replace("[", r"\[") for text in row))
    return table, reasons


def as_results(matrix: Matrix, results: Results) -> None:
    """Add what was found: a metric for each cell with a time, the reason of each without one."""
    good = bad = 0
    for release, cells in matrix.items():
        for name, cell in cells.items():
            if cell.reason:
                bad += 1
                results.settings[f"{release}.{name}"] = cell.reason
            else:
                good += 1
                results.metrics[f"{release}.{name}_s"] = summarise(cell.seconds, "s")
    results.metrics["releases.cells"] = Metric(good, good, 1, "count")
    results.metrics["releases.missing"] = Metric(bad, bad, 1, "count")


def versions(names: Sequence[str]) -> Mapping[str, str]:
    """Return the version of each release that runs here."""
    found = {}
    for name in names:
        if not releases.why_not(name):
            root = releases.find(name).root or Path("/")
            found[name] = version_of(programs_of(root)["/usr/sbin/slurmd"])
    return found


def tell(line: str) -> None:
    """Report progress."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the matrix. Returns the exit code."""
    made = parser("releases", CELLS)
    made.add_argument(
        "--slurm", action="append", choices=list(releases.SUITES), help="only this (repeatable)"
    )
    args = made.parse_args(argv)
    results = results_for("releases", args)
    names = args.case or list(CELLS)
    runs = results.runs or (1 if results.quick else RUNS)
    wanted = args.slurm or list(releases.SUITES)
    matrix = {release: column(release, names, runs) for release in wanted}
    as_results(matrix, results)
    results.settings |= {f"{name}.version": text for name, text in versions(wanted).items()}
    table, reasons = matrix_table(matrix, names)
    console = Console()
    console.print(table)
    for number, reason in enumerate(reasons, 1):
        console.print(f"[{number}] {reason}", markup=False, soft_wrap=True)
    facts = ", ".join(f"{key}: {value}" for key, value in machine().items())
    console.print(facts, markup=False, soft_wrap=True)
    if args.json:
        args.json.write_text(json.dumps(results.as_dict(), indent=2) + "\n", encoding="utf-8")
    return int(any(cell.wrong for cells in matrix.values() for cell in cells.values()))


if __name__ == "__main__":
    raise SystemExit(main())
