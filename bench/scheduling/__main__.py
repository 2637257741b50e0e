"""The time that a job waits for machines: ``python -m bench.scheduling``.

The weighted average scheduling time of ByteRobust's four settings, ours against requeue,
reschedule and an oracle, from the phases that bench.recovery measured (and bench.heartbeat's time
to order many nodes to start). Takes no time of its own;
``--lab`` (root) measures several nodes lost at once and a pool that is too small as well.
See docs/bench.md for what is measured, what is put together, and what is assumed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import MIN_SAMPLES, REPOSITORY, Metric, Results, finish, parser, results_for
from bench.pool_sizes import RATES, SETTINGS
from bench.scheduling.lab import measure
from bench.scheduling.model import (
    FEWER,
    LEASED,
    STRATEGIES,
    SWITCH,
    Metrics,
    MissingError,
    Term,
    Times,
    compose,
    metric,
    scaled,
    scheduling_time,
    time_of,
)
from bench.scheduling.plot import Bar, bars
from robust_slurm.config import Config
from standby.size.count import Distribution, LossSource, SizeError, losses, pool

RECORDS = REPOSITORY / "docs" / "bench"
MACHINES = tuple(setting.machines for setting in SETTINGS if setting.standbys is not None)
RATE = RATES[0].per_1000
GROUP = 8
# 15 evictions of a group in 90 days at 1,200 machines (ByteRobust, table 4 and 6.1).
GROUP_RATE = round(1000 * 15 / (90 * 1200), 3)
WAS, OVER_EVICTION = "was", "over_eviction"
OURS = ("ours_spare", "ours_standby")
POOLS = ("single", "compound")


AtScale = Mapping[int, Times]
"""T by the number of machines of the training."""


class RecordError(ValueError):
    """A file of measurements that cannot be used; the text says why."""


def kept(benchmark: str) -> list[Path]:
    """The records of a benchmark, NAME-DATE.json or NAME-PART-DATE.json, the oldest first.

    Those of an older version beside a newer one (``before``) are left out. Raises RecordError.
    """
    name = re.compile(rf"{benchmark}(?:-(?!before-)[a-z]+)?-(\d{{4}}-\d\d-\d\d[a-z]?)\.json")
    found = [(m[1], path) for path in RECORDS.iterdir() if (m := name.fullmatch(path.name))]
    if not found:
        what = f"measure with python -m bench.{benchmark} --json"
        raise RecordError(f"no {benchmark}-DATE.json in {RECORDS}: {what}")
    return [path for _, path in sorted(found)]


def read(path: Path) -> dict[str, Any]:
    """A record of bench.recovery or bench.heartbeat, or of ours with --lab. Raises RecordError."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        sound = [
            0.0 <= float(metric["median"]) <= float(metric["p95"]) and int(metric["n"]) > 0
            for metric in record["metrics"].values()
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RecordError(f"{path} is no record of a benchmark: {error!r}") from None
    if not all(sound):
        name = list(record["metrics"])[sound.index(False)]
        raise RecordError(f"{path}: {name} cannot have been measured")
    return dict(record)


def cases(metrics: Metrics) -> dict[str, dict[str, Mapping[str, float]]]:
    """The metrics by name, by their case."""
    found: dict[str, dict[str, Mapping[str, float]]] = {}
    for name, values in metrics.items():
        found.setdefault(name.partition(".")[0], {})[name] = values
    return found


def add(results: Results, name: str, term: Term) -> None:
    results.metrics[f"{name}_s"] = Metric(term.median, term.p95, term.n, "s")


def add_terms(results: Results, times: Times, orders: Term) -> None:
    """Add the terms that T(k) is put together from, each with its source."""
    for name, term in [*terms(times), ("start_orders", orders)]:
        add(results, f"term.{name}", term)
        results.settings[f"term.{name}"] = term.source


def terms(times: Times) -> Iterator[tuple[str, Term]]:
    for kind, by in (("spare", times.spare), ("standby", times.standby)):
        for count, term in sorted(by.items()):
            yield (kind if count == 1 else f"{kind}_{count}"), term
    yield "reschedule", times.reschedule
    yield "requeue", times.requeue
    yield "last_rung", times.last_rung
    yield "fewer", times.fewer
    if times.leased is not None:
        yield "leased", times.leased


def add_was(results: Results, at: AtScale, args: argparse.Namespace) -> None:
    """The four strategies and ours in all its forms, at every scale.

    ``t_<k>.<ours>/oracle``: of k machines at once, at the largest scale.
    """
    pools = {}
    for machines in MACHINES:
        lost = losses(machines, [LossSource(1, args.rate / 1000)])
        pools[machines] = most = _standbys(lost)
        case = f"{WAS}_{machines}"
        times, left = at[machines], args.machines_left
        for strategy in times.strategies():
            found = scheduling_time(times, strategy, lost, most, most, left)
            add(results, f"{case}.{strategy}", found)
        for ours in times.ours():
            for other in ("requeue", "reschedule"):
                name = f"{case}.{other}/{ours}"
                results.ratio(name, f"{case}.{other}_s", f"{case}.{ours}_s")
            results.ratio(f"{case}.{ours}/oracle", f"{case}.{ours}_s", f"{case}.oracle_s")
    for k in (*range(1, most + 1), SWITCH):
        best = time_of(times, "oracle", k, most, left).median
        for ours in times.ours():
            found = time_of(times, ours, k, most, left)
            results.ratios[f"t_{k}.{ours}/oracle"] = found.median / best
    results.settings["pools"] = _listed(pools)


def add_over_eviction(results: Results, at: AtScale, args: argparse.Namespace) -> None:
    """WAS where groups leave as well, with a pool for single machines and with one for both."""
    sizes: dict[str, dict[int, int]] = {which: {} for which in POOLS}
    for machines in MACHINES:
        single = LossSource(1, args.rate / 1000)
        both = losses(machines, [single, LossSource(args.group, args.group_rate / 1000)])
        sizes["compound"][machines] = most = _standbys(both)
        sizes["single"][machines] = _standbys(losses(machines, [single]))
        times, left = at[machines], args.machines_left
        for ours in OURS:
            case = f"{OVER_EVICTION}_{machines}.{ours}"
            for which in POOLS:
                standbys = sizes[which][machines]
                found = scheduling_time(times, ours, both, most, standbys, left)
                add(results, f"{case}_{which}_pool", found)
            pools = [f"{case}_{which}_pool_s" for which in POOLS]
            results.ratio(f"{case}.single/compound", *pools)
    for which in POOLS:
        results.settings[f"{which}_pools"] = _listed(sizes[which])


def _standbys(lost: Distribution) -> int:
    """The P99 pool. Raises SizeError if it is empty: then nothing can be averaged."""
    found = pool(lost)
    if not found:
        raise SizeError("at such a rate no standby is needed at all: see --rate")
    return found


def _listed(sizes: Mapping[int, int]) -> str:
    return ", ".join(f"{machines}: {size}" for machines, size in sizes.items())


CASES: Mapping[str, Callable[[Results, AtScale, argparse.Namespace], None]] = {
    WAS: add_was,
    OVER_EVICTION: add_over_eviction,
}


def plot(results: Results) -> str:
    """The SVG of the case ``was``."""
    groups = {}
    for machines in MACHINES:
        names = {f"{WAS}_{machines}.{name}_s": name for name in (*STRATEGIES, LEASED, FEWER)}
        found = {names[n]: m for n, m in results.metrics.items() if n in names}
        groups[f"{machines} machines"] = {
            name.replace("_", ", "): Bar(m.median, m.p95) for name, m in found.items()
        }
    return bars(
        "Weighted average scheduling time",
        "seconds (logarithmic)",
        groups,
        "medians; the line ends at p95; measured with 4 nodes, weights of 128 to 1,024 machines",
    )


def options() -> argparse.ArgumentParser:
    made = parser("scheduling", CASES)
    made.add_argument(
        "--recovery",
        type=Path,
        action="append",
        metavar="FILE",
        help="measurements, by default all of bench.recovery that are kept (repeatable; a case in "
        "several: the last one)",
    )
    made.add_argument("--plot", type=Path, metavar="FILE.svg", help="write a bar plot there")
    made.add_argument("--lab", action="store_true", help="measure several lost nodes (root)")
    made.add_argument(
        "--rate",
        type=float,
        default=RATE,
        help="machines that fail, per 1,000 machine-days (%(default)s: the paper's pool sizes)",
    )
    made.add_argument("--group", type=int, default=GROUP, help="machines of an over-eviction")
    made.add_argument(
        "--group-rate",
        type=float,
        default=GROUP_RATE,
        help="over-evictions, per 1,000 machine-days (%(default)s: 15 in 90 days at 1,200)",
    )
    made.add_argument(
        "--reinstall",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="until a machine from outside the pool can be used (%(default)s: at once)",
    )
    made.add_argument(
        "--machines-left",
        action="store_true",
        help=f"when {SWITCH} machines are lost as many others are idle (default: requeue)",
    )
    return made


def measurements(
    results: Results, files: Sequence[Path], lab: bool
) -> tuple[dict[str, Mapping[str, float]], bool]:
    """All metrics by name, and whether the lab measured all it should. Raises RecordError.

    A case is taken whole from the last file that has it, with MIN_SAMPLES if any has.
    """
    records = [read(path) for path in files]
    last: dict[str, tuple[bool, int]] = {}
    for number, record in enumerate(records):
        for case, values in cases(record["metrics"]).items():
            enough = min(int(value["n"]) for value in values.values()) >= MIN_SAMPLES
            last[case] = max(last.get(case, (False, 0)), (enough, number))
    known: dict[str, Mapping[str, float]] = {}
    for number, (path, record) in enumerate(zip(files, records, strict=True)):
        by_case = cases(record["metrics"])
        taken = [case for case in by_case if last[case][1] == number]
        if not taken:
            continue
        known |= {name: values for case in taken for name, values in by_case[case].items()}
        results.quick |= bool(record.get("quick"))
        facts = ", ".join(f"{k} {v}" for k, v in record.get("machine", {}).items())
        results.settings[f"measured_{number}"] = f"{path.name} ({facts}): {', '.join(taken)}"
    fine = measure(results) if lab else True
    own: Metrics = {
        n: {"median": m.median, "p95": m.p95, "n": m.n} for n, m in results.metrics.items()
    }
    return known | dict(own), fine


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; exit code 1 when the lab could not measure a case, 2 for wrong usage."""
    args = options().parse_args(argv)
    results = results_for("scheduling", args)
    names = args.case or list(CASES)
    if args.plot and WAS not in names:
        options().error(f"--plot shows the case {WAS}")
    if not 0.0 <= args.reinstall < float("inf"):
        options().error(f"--reinstall {args.reinstall:g}: seconds, 0 or more")
    try:
        files = [*kept("heartbeat"), *(args.recovery or kept("recovery"))]
        known, fine = measurements(results, files, args.lab)
        times = compose(known, reinstall=args.reinstall, wait=Config().standby_wait)
        orders = metric(known, "supervisor.start_orders")
        add_terms(results, times, orders)
        at = {machines: scaled(times, orders, machines) for machines in MACHINES}
        for name in names:
            CASES[name](results, at, args)
    except (RecordError, MissingError, SizeError) as error:
        print(f"bench.scheduling: {error}", file=sys.stderr)
        return 2
    results.settings |= {
        "rate_per_1000_machine_days": args.rate,
        "groups": f"{args.group} machines, {args.group_rate:g} per 1,000 machine-days",
        "assumed": f"reinstall {args.reinstall:g} s; for {SWITCH} machines at once "
        + ("others are idle" if args.machines_left else "only the queue"),
        "p95": "every time at its own p95, not the p95 of the average",
    }
    if args.plot:
        args.plot.write_text(plot(results), encoding="utf-8")
    return finish(results, args) or (0 if fine else 1)


if __name__ == "__main__":
    raise SystemExit(main())
