"""Parts of all benchmarks: samples → median and p95, ratios, the machine, table and JSON.

A benchmark is a module, or the ``__main__`` of a package, with named cases; a case measures and
adds samples:

    def rank_kill(results: Results) -> None:
        results.add("rank_kill.detect_s", samples, "s")

    if __name__ == "__main__":
        raise SystemExit(main("recovery", {"rank_kill": rank_kill}))

and ``python -m bench.recovery [--quick] [--case NAME]… [--json FILE]`` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parents[1]
MIN_SAMPLES = 20

NOISE = (
    "Absolute times on a shared machine are noisy: compare what was measured side by side in one "
    "run (the ratios), and look at p95 before believing a median."
)


class BenchError(RuntimeError):
    """A program under measurement did not do what is needed of it; says where to look."""


@dataclass(frozen=True, slots=True)
class Metric:
    """The summary of one metric's samples; ``median`` and ``p95`` in ``unit``."""

    median: float
    p95: float
    n: int
    unit: str


def summarise(samples: Sequence[float], unit: str) -> Metric:
    """Median and 95th percentile (nearest rank). ValueError when there is no sample."""
    if not samples:
        raise ValueError("no samples: the case measured nothing")
    ordered = sorted(samples)
    rank = -(-95 * len(ordered) // 100)  # ceil, 1-based
    return Metric(statistics.median(ordered), ordered[rank - 1], len(ordered), unit)


@dataclass(slots=True)
class Results:
    """The findings of a benchmark's run."""

    name: str
    quick: bool = False
    """A short run to see that the benchmark works; its numbers prove nothing."""
    runs: int | None = None
    """Runs per case where the default is not wanted; ``quick`` is set with it."""
    metrics: dict[str, Metric] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    settings: dict[str, str | float] = field(default_factory=dict)
    """Conditions that the numbers depend on and a reader must know."""
    lists: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    """Records for the JSON alone."""

    def add(self, metric: str, samples: Sequence[float], unit: str) -> Metric:
        """Record a metric ``<case>.<phase>``. ValueError under 20 samples, unless quick."""
        if len(samples) < MIN_SAMPLES and not self.quick:
            raise ValueError(f"{metric}: {len(samples)} samples; at least {MIN_SAMPLES} are needed")
        self.metrics[metric] = summary = summarise(samples, unit)
        return summary

    def count(self, metric: str, number: int) -> None:
        """Record how often something came; there are no samples of it."""
        self.metrics[metric] = summarise([number], "count")

    def once(self, metric: str, value: float, unit: str) -> None:
        """Record what a run does only once; its number of samples shows it."""
        self.metrics[metric] = summarise([value], unit)

    def ratio(self, name: str, numerator: str, denominator: str) -> float:
        """Record the ratio of two metrics' medians. KeyError if one was not measured."""
        value = self.metrics[numerator].median / self.metrics[denominator].median
        self.ratios[name] = value
        return value

    def as_dict(self) -> dict[str, object]:
        """The JSON form: metrics, ratios, settings, machine."""
        return {
            "benchmark": self.name,
            "quick": self.quick,
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            "ratios": self.ratios,
            "settings": self.settings,
            **({"lists": self.lists} if self.lists else {}),
            "machine": machine(),
        }

    def show(self, console: Console | None = None) -> None:
        """Print metrics, ratios and the machine."""
        console = console or Console()
        table = Table(title=f"bench.{self.name}{' (quick)' if self.quick else ''}")
        table.add_column("metric")
        for title in ("median", "p95", "n"):
            table.add_column(title, justify="right")
        table.add_column("unit")
        for name, metric in self.metrics.items():
            table.add_row(
                name, f"{metric.median:.4g}", f"{metric.p95:.4g}", str(metric.n), metric.unit
            )
        for name, value in self.ratios.items():
            table.add_row(name, f"{value:.3g}", "", "", "ratio")
        console.print(table)
        if self.settings:
            console.print(_pairs(self.settings), soft_wrap=True)
        console.print(_pairs(machine()), soft_wrap=True)
        console.print(NOISE, soft_wrap=True)


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in values.items())


def machine() -> dict[str, str | int | float]:
    """Describe the machine of the measurements. ``torch`` only when the benchmark imported it."""
    mem_kib = int((_first_value("/proc/meminfo", "MemTotal") or "0").split()[0])
    facts: dict[str, str | int | float] = {
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "mem_gib": round(mem_kib / 2**20),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }
    torch = sys.modules.get("torch")
    if torch is not None:
        facts["torch"] = str(torch.__version__)
    return facts


def _first_value(path: str, key: str) -> str | None:
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    return None


def ns_per_call(
    statements: Mapping[str, str], names: Mapping[str, object], *, calls: int, samples: int
) -> dict[str, list[float]]:
    """Nanoseconds per execution of each statement, loop included (about 5 ns), ``samples`` each.

    The statements take turns, so that a slow moment of the machine hits all of them alike.
    """
    timers = {key: timeit.Timer(text, globals=dict(names)) for key, text in statements.items()}
    found: dict[str, list[float]] = {key: [] for key in statements}
    for timer in timers.values():
        timer.timeit(calls // 10 + 1)
    for _ in range(samples):
        for key, timer in timers.items():
            found[key].append(timer.timeit(calls) / calls * 1e9)
    return found


def parser(name: str, cases: Iterable[str]) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}")
    made.add_argument("--quick", action="store_true", help="short run; its numbers prove nothing")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    made.add_argument(
        "--case", action="append", choices=list(cases), help="run only this case (repeatable)"
    )
    made.add_argument("--runs", type=int, help=argparse.SUPPRESS)
    return made


def results_for(name: str, args: argparse.Namespace) -> Results:
    """Empty results for a run with these options."""
    return Results(name, quick=args.quick or args.runs is not None, runs=args.runs)


def in_time(
    results: Results,
    cases: Mapping[str, Callable[[float], None]],
    seconds: tuple[float, float],
    went_wrong: tuple[type[Exception], ...],
    file: Path | None,
) -> list[str]:
    """Run cases one after another, and write all after each; the names of those that went wrong.

    ``seconds``: for all, and those that must be left for one to begin; a case gets those left.
    """
    budget, least = seconds
    end, failed = time.monotonic() + budget, []
    for name, call in cases.items():
        left, known = end - time.monotonic(), set(results.metrics)
        if left < least:
            results.settings[f"not measured: {name}"] = "the time was over"
            continue
        print(f"{time.strftime('%H:%M:%S')} {name}, {left:.0f} s are left", flush=True)
        try:
            call(left)
        except went_wrong as error:
            failed.append(name)
            results.settings[f"failed: {name}"] = str(error)
            print(f"  failed: {error}", flush=True)
        so_far(results, known, file)
    return failed


def so_far(results: Results, known: set[str], file: Path | None) -> None:
    """Print the metrics that are new, and write all: the machine may be taken away at any time."""
    for name, metric in results.metrics.items():
        if name not in known:
            print(f"  {name} {metric.median:.4g} {metric.unit} (n {metric.n})", flush=True)
    if file is not None:
        file.write_text(json.dumps(results.as_dict(), indent=2) + "\n", encoding="utf-8")


def finish(results: Results, args: argparse.Namespace) -> int:
    """Print the table and write the JSON. Returns the exit code."""
    results.show()
    if args.json:
        args.json.write_text(json.dumps(results.as_dict(), indent=2) + "\n", encoding="utf-8")
    return 0


def main(
    name: str, cases: Mapping[str, Callable[[Results], None]], argv: Sequence[str] | None = None
) -> int:
    """Run the chosen cases one after another. Returns the exit code."""
    args = parser(name, cases).parse_args(argv)
    results = results_for(name, args)
    for case in args.case or cases:
        cases[case](results)
    return finish(results, args)
