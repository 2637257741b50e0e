"""Run bench.parity: ``python -m bench.parity [--quick] [--list] [--case NAME]… [--json FILE]``."""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import Queue

from rich.console import Console
from rich.table import Table

from bench.common import Results, finish, parser, results_for, so_far
from bench.parity.cases import WAYS
from bench.parity.pair import Outcome, run
from bench.parity.way import Way


def describe(one: Outcome) -> str:
    """Return one line on a way."""
    if one.void:
        return f"{one.way.name}: void: {one.void}"
    wrong = list(one.worse)
    if one.robust.blamed:
        wrong.append(f"blamed {' '.join(one.robust.blamed)}")
    if one.leftovers:
        wrong.append(f"left over: {', '.join(one.leftovers)}")
    return f"{one.way.name}: {'; '.join(wrong) or 'as good'}"


def record(results: Results, found: Sequence[Outcome]) -> None:
    """Add the counts, and both times of each way."""
    proven = [one for one in found if not one.void]
    for one in proven:
        results.once(f"{one.way.name}.srun_s", one.srun.seconds, "s")
        results.once(f"{one.way.name}.robust_s", one.robust.seconds, "s")
    results.count("parity.cases", len(proven))
    results.count("parity.worse", sum(bool(one.worse) for one in proven))
    results.count("parity.nodes_blamed", sum(len(one.robust.blamed) for one in proven))
    results.count("parity.leftovers", sum(len(one.leftovers) for one in proven))
    results.count("parity.void", len(found) - len(proven))
    for one in found:
        if one.void:
            results.settings[f"void: {one.way.name}"] = one.void
        elif one.worse or one.robust.blamed or one.leftovers:
            results.settings[f"worse: {one.way.name}"] = describe(one).partition(": ")[2]


def table(found: Sequence[Outcome]) -> Table:
    """Return the table of both, side by side."""
    made = Table(title="bench.parity: the same under srun and under robust-srun")
    for title in ("way", "kind", "srun s", "robust s", "code", "blamed", "worse"):
        made.add_column(title, no_wrap=title == "way")
    for one in sorted(found, key=lambda one: (one.way.kind, one.way.name)):
        times = [f"{run.seconds:.1f}" for run in (one.srun, one.robust)]
        codes = f"{one.srun.code}/{one.robust.code}"
        wrong = f"void: {one.void}" if one.void else "; ".join([*one.worse, *one.leftovers])
        blamed = " ".join(one.robust.blamed)
        made.add_row(one.way.name, one.way.kind, *times, codes, blamed, wrong)
    return made


def measure(ways: Sequence[Way], results: Results, args: argparse.Namespace) -> list[Outcome]:
    """Run the ways; print and write each as it ends."""
    done: Queue[Outcome] = Queue()
    worker = threading.Thread(target=run, args=(ways, done), daemon=True)
    worker.start()
    found: list[Outcome] = []
    while len(found) < len(ways):
        one = done.get()
        found.append(one)
        print(f"{time.strftime('%H:%M:%S')} {describe(one)}", file=sys.stderr, flush=True)
        if args.keep and describe(one).partition(": ")[2] != "as good":
            args.keep.mkdir(parents=True, exist_ok=True)
            (args.keep / f"{one.way.name}.txt").write_text(
                "\n".join([describe(one), *one.robust.said, ""])
            )
        record(results, found)
        so_far(results, set(results.metrics), args.json)
    worker.join()
    return found


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    made = parser("parity", WAYS)
    made.add_argument("--list", action="store_true", help="print the ways and end")
    made.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep there what robust-srun wrote where it is worse",
    )
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 if a way is worse or proves nothing."""
    args = arguments(argv)
    if args.list:
        for way in WAYS.values():
            print(f"{way.name:26} {way.kind:6} {way.tells}{'' if not way.long else ' (not quick)'}")
        return 0
    results = results_for("parity", args)
    names = args.case or [name for name, way in WAYS.items() if not (args.quick and way.long)]
    began = time.monotonic()
    try:
        found = measure([WAYS[name] for name in names], results, args)
    except KeyboardInterrupt:
        os._exit(130)  # the labs end with this process; their threads would be waited for
    results.settings["wall_min"] = round((time.monotonic() - began) / 60, 1)
    record(results, found)
    Console(width=150).print(table(found))
    code = finish(results, args)
    return code or int(any(one.void or one.worse or one.robust.blamed for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
