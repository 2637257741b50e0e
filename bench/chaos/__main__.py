"""Run bench.chaos: ``python -m bench.chaos [--list] [--case NAME]… [--runs N] [--json FILE]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.chaos.case import Case, Run, run
from bench.chaos.local import LOCAL
from bench.chaos.shared import SHARED
from bench.chaos.verdict import COMPLETED
from bench.common import Results, finish, parser, results_for, summarise

CASES = {case.name: case for case in [*SHARED, *LOCAL]}
RUNS = 5
QUICK = ("stall_program_recovery", "outage_others_3s", "staggered_exits", "node_crash")


def measure(cases: Sequence[Case], runs: int, labs: int, keep: Path | None) -> list[Run]:
    """Run every case `runs` times, `labs` labs at a time; the cases take turns."""
    found: list[Run] = []
    with ThreadPoolExecutor(labs) as pool:
        turns = [pool.submit(run, case) for _ in range(runs) for case in cases]
        for future in as_completed(turns):
            one = future.result()
            found.append(one)
            print(f"{time.strftime('%H:%M:%S')} {describe(one)}", file=sys.stderr, flush=True)
            if keep and not (one.verdict and one.verdict.right):
                keep.mkdir(parents=True, exist_ok=True)
                (keep / f"{one.case}-{len(found)}.txt").write_text(f"{describe(one)}\n{one.out}")
    return found


def describe(one: Run) -> str:
    """Return one line on a run."""
    if one.verdict is None:
        return f"{one.case}: not run: {one.error}"
    verdict = one.verdict
    wrong = [
        f"blamed {' '.join(verdict.blamed)}" if verdict.blamed else "",
        f"missed {' '.join(verdict.missed)}" if verdict.missed else "",
        f"job lost: {verdict.lost}" if verdict.lost else "",
        f"left over: {', '.join(verdict.leftovers)}" if verdict.leftovers else "",
    ]
    text = "; ".join(part for part in wrong if part) or "right"
    return f"{one.case}: {verdict.end}, longest gap {verdict.gap:.1f} s: {text}"


def summary(results: Results, runs: Sequence[Run]) -> Table:
    """Add the metrics; return the table of cases and outcomes."""
    table = Table(title="bench.chaos: what each fault did")
    for title in ("case", "runs", "ended", "gap s", "blamed", "missed", "lost", "left over"):
        table.add_column(title, no_wrap=title == "case")
    judged = {name: [r.verdict for r in runs if r.case == name and r.verdict] for name in CASES}
    total = {"healthy_nodes_blamed": 0, "healthy_jobs_lost": 0, "leftovers": 0, "missed": 0}
    for name, verdicts in judged.items():
        if not verdicts:
            continue
        counts = {
            "healthy_nodes_blamed": sum(len(v.blamed) for v in verdicts),
            "missed": sum(len(v.missed) for v in verdicts),
            "healthy_jobs_lost": sum(bool(v.lost) for v in verdicts),
            "leftovers": sum(len(v.leftovers) for v in verdicts),
        }
        for key, count in counts.items():
            total[key] += count
        gaps = [v.gap for v in verdicts if v.end == COMPLETED]
        shown = ""
        if gaps:
            gap = results.metrics[f"{name}.recovery_s"] = summarise(gaps, "s")
            shown = f"{gap.median:.1f}"
        ends = "/".join(sorted({v.end for v in verdicts}))
        numbers = [str(count or "") for count in counts.values()]
        table.add_row(name, str(len(verdicts)), ends, shown, *numbers)
    results.count("chaos.kinds", sum(bool(verdicts) for verdicts in judged.values()))
    results.count("chaos.runs", sum(len(verdicts) for verdicts in judged.values()))
    for key, count in total.items():
        results.count(f"chaos.{key}", count)
    return table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    made = parser("chaos", CASES)
    made.add_argument("--list", action="store_true", help="print the cases and end")
    made.add_argument("--long", action="store_true", help="also the stalls of 40 s and 5 min")
    made.add_argument("--labs", type=int, default=2, help="labs at a time (default: 2)")
    made.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the output of wrong runs there"
    )
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when a run went wrong or could not be made."""
    args = arguments(argv)
    if args.list:
        for case in CASES.values():
            print(f"{case.name:26} {case.broken}{' (--long)' if case.long else ''}")
        return 0
    results = results_for("chaos", args)
    names = args.case or (QUICK if args.quick else [n for n, c in CASES.items() if not c.long])
    if args.long and not args.case:
        names = list(CASES)
    runs = args.runs or (1 if args.quick else RUNS)
    results.quick = args.quick or runs < RUNS
    results.settings |= {"runs": runs, "labs": args.labs}
    began = time.monotonic()
    found = measure([CASES[name] for name in names], runs, args.labs, args.keep)
    results.settings["wall_min"] = round((time.monotonic() - began) / 60, 1)
    Console(width=120).print(summary(results, found))
    for one in found:
        if one.verdict is None:
            print(describe(one))
    code = finish(results, args)
    return code or int(not all(one.verdict and one.verdict.right for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
