"""Run bench.faults: ``python -m bench.faults [--list] [--case NAME]… [--seeds N]``."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.chaos.__main__ import describe
from bench.chaos.case import Run, run
from bench.common import Results, finish, parser, results_for, summarise
from bench.faults import soak
from bench.faults.judge import Finding, find
from bench.faults.kinds import KINDS

SEEDS = 3
QUICK = ("sigkill", "user_rank", "node_crash")


class Turn(NamedTuple):
    """One kind with one seed: its run and what was found, or None for a run that was not made."""

    kind: str
    seed: int
    run: Run
    finding: Finding | None


def turn(name: str, seed: int) -> Turn:
    """Run one kind with one seed and judge it."""
    kind = KINDS[name]
    case = kind.case(seed)
    one = run(case)
    finding = None
    if one.verdict:
        only = case.expected.named
        bad = case.expected.found | (only or frozenset())
        finding = find(
            bad,
            kind.causes,
            one.verdict,
            one.incidents,
            one.began,
            no_others=only is not None,
        )
    return Turn(name, seed, one, finding)


def measure(names: Sequence[str], seeds: range, labs: int, minutes: float) -> list[Turn]:
    """Run all kinds with every seed, `labs` at a time; begin none after so many minutes."""
    end = time.monotonic() + 60 * minutes
    found: list[Turn] = []

    def within(name: str, seed: int) -> Turn | None:
        return turn(name, seed) if time.monotonic() < end else None

    with ThreadPoolExecutor(labs) as pool:
        turns = [pool.submit(within, name, seed) for seed in seeds for name in names]
        for future in as_completed(turns):
            if one := future.result():
                found.append(one)
                print(f"{time.strftime('%H:%M:%S')} {line(one)}", file=sys.stderr, flush=True)
    return found


def line(one: Turn) -> str:
    """Return one line on a run."""
    said = f"; said {one.finding.causes} of {sorted(one.finding.named)}" if one.finding else ""
    return f"{describe(one.run)}, seed {one.seed}{said}, {one.run.seconds:.0f} s"


def summary(results: Results, turns: Sequence[Turn]) -> Table:
    """Add the metrics; return the table of runs."""
    table = Table(title="bench.faults: each run")
    titles = ("kind", "seed", "detected s", "cause", "named", "right", "false evictions", "lost")
    for title in titles:
        table.add_column(title, no_wrap=title == "kind")
    order = list(KINDS)
    judged = [(t, t.finding) for t in turns if t.finding]
    for one, finding in sorted(judged, key=lambda pair: (order.index(pair[0].kind), pair[0].seed)):
        wrong = [] if finding.cause_right else ["cause"]
        wrong += ["machine"] if finding.machine_right is False else []
        wrong += ["end"] if one.run.verdict and one.run.verdict.lost else []
        wrong += ["leftovers"] if one.run.verdict and one.run.verdict.leftovers else []
        wrong += ["eviction"] if finding.evictions else []
        wrong += ["missed"] if one.run.verdict and one.run.verdict.missed else []
        table.add_row(
            one.kind,
            str(one.seed),
            "" if finding.detected is None else f"{finding.detected:.2f}",
            " ".join(finding.causes),
            " ".join(sorted(finding.named)),
            f"wrong: {', '.join(wrong)}" if wrong else "right",
            str(finding.evictions or ""),
            "?" if finding.lost_steps is None else str(finding.lost_steps),
        )
    findings = [finding for _, finding in judged]
    machines = [float(f.machine_right) for f in findings if f.machine_right is not None]
    if machines:
        share = sum(machines) / len(machines)
        metric = summarise(machines, "share")
        results.metrics["faults.right_machine"] = type(metric)(share, share, len(machines), "share")
    if found := [f.detected for f in findings if f.detected is not None]:
        results.metrics["faults.detect_s"] = summarise(found, "s")
    if lost := [float(f.lost_steps) for f in findings if f.lost_steps is not None]:
        results.metrics["faults.lost_steps"] = summarise(lost, "steps")
    results.count("faults.kinds", len({one.kind for one, _ in judged}))
    results.count("faults.runs", len(judged))
    results.count("faults.right", sum(f.right for f in findings))
    results.count("faults.right_cause", sum(f.cause_right for f in findings))
    results.count("faults.false_evictions", sum(f.evictions for f in findings))
    for name in KINDS:
        own = [f.detected for one, f in judged if one.kind == name and f.detected is not None]
        if own:
            results.metrics[f"{name}.detect_s"] = summarise(own, "s")
    results.settings |= {
        f"wrong: {one.kind}/{one.seed}": line(one) for one, f in judged if not f.right
    }
    return table


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    made = parser("faults", KINDS)
    made.add_argument("--list", action="store_true", help="print the kinds and end")
    made.add_argument("--seeds", type=int, help=f"seeds of each kind (default: {SEEDS})")
    made.add_argument("--labs", type=int, default=2, help="labs at a time (default: 2)")
    made.add_argument(
        "--minutes", type=float, default=600.0, help="begin no run after so long (default: 600)"
    )
    made.add_argument(
        "--soak",
        type=float,
        metavar="MINUTES",
        help="random faults in one long training, for so long; --case: only of these kinds",
    )
    made.add_argument(
        "--torch", action="store_true", help="soak the training over gloo with snapshots"
    )
    made.add_argument(
        "--seed", type=int, default=0, help="of the soak, or the first of each kind (default: 0)"
    )
    made.add_argument(
        "--keep", type=Path, metavar="DIR", help="keep the soak's output and incidents there"
    )
    return made.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when a run went wrong or could not be made."""
    args = arguments(argv)
    if args.list:
        for kind in KINDS.values():
            print(f"{kind.name:20} {kind.broken}")
        return 0
    if args.soak is not None:
        return soak.main(args)
    results = results_for("faults", args)
    names = args.case or (QUICK if args.quick else list(KINDS))
    seeds = args.seeds or args.runs or (1 if args.quick else SEEDS)
    results.quick = args.quick or seeds < SEEDS
    results.settings |= {"seeds": seeds, "first_seed": args.seed, "labs": args.labs}
    began = time.monotonic()
    turns = measure(names, range(args.seed, args.seed + seeds), args.labs, args.minutes)
    results.quick |= len(turns) < seeds * len(names)
    results.settings["wall_min"] = round((time.monotonic() - began) / 60, 1)
    Console(width=120).print(summary(results, turns))
    for one in turns:
        if one.finding is None:
            print(line(one))
    code = finish(results, args)
    return code or int(not all(one.finding and one.finding.right for one in turns))


if __name__ == "__main__":
    raise SystemExit(main())
