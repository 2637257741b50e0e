"""The time until a lost node is seen, and losses of healthy ones: ``python -m bench.detection``.

``simulated``: 24 h of 1,250 nodes, as one job and as jobs of 64, whose nodes stumble. ``outages``:
what one outage of a node costs, by its length. ``lab`` (root): crashes of a node in a lab of real
Slurm daemons, before and now in turns. Exit code 1 if a healthy node was lost by the rule of now
and not by the one of before, or if a run of the lab went wrong. See docs/bench.md.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from bench.common import MIN_SAMPLES, Results, finish, parser, results_for, summarise
from bench.detection.lab import crashes
from bench.detection.simulate import NEVER, Signs, Stumble, walk
from bench.detection.stumbles import PAUSES, Kind, assumed, kinds
from robust_slurm.config import Config
from srun_wrapper.detect.unreachable import REMEMBERED, SilencePatience
from srun_wrapper.job.state import INTERVALS, PULSE, SLOWEST

NODES = 1250
HOURS, QUICK_HOURS = 24.0, 0.5
LARGE, SMALL = Signs(SLOWEST, SLOWEST), Signs(INTERVALS[0][1], PULSE)
JOBS: Mapping[str, tuple[int, int, Signs]] = {  # name: jobs, nodes of each
    "simulated": (1, NODES, LARGE),
    "simulated_64": (20, INTERVALS[0][0], SMALL),
}
LENGTHS = (0.3, 0.4, 0.45, 0.5, 0.6, 0.8, 1.0, 1.5, 2.0)
WALKS, QUICK_WALKS = 2000, 200
QUICK_RUNS = 2


class Day:
    """The stumbles of one job in so many hours, one after another."""

    def __init__(self, nodes: int, signs: Signs, hours: float, seed: int) -> None:
        self._nodes = nodes
        self._signs = signs
        self._hours = hours
        self._random = random.Random(seed)

    def run(self, all_kinds: Sequence[Kind]) -> tuple[Counter[str], int, int]:
        """Return how many came of each kind, and how many nodes the two rules lost by them."""
        came, before, now = Counter[str](), 0, 0
        patience = SilencePatience(Config().unreachable_limit)
        events = sorted(
            (self._random.uniform(0.0, self._hours * 3600.0), number)
            for number, kind in enumerate(all_kinds)
            for _ in range(self._times(kind))
        )
        for at, number in events:
            kind = all_kinds[number]
            came[kind.name] += 1
            stumble = Stumble(kind.what, kind.draw(self._random))
            seen = walk(stumble, self._signs, _At(patience, at), self._random)
            before += seen.before < NEVER
            now += seen.now < NEVER
        return came, before, now

    def _times(self, kind: Kind) -> int:
        whole = kind.per_day * self._hours / 24.0
        mean = whole if kind.what in ("group", "supervisor") else whole * self._nodes
        return int(mean) + (self._random.random() < mean % 1.0)


class _At(SilencePatience):
    """The patience of a job, at some time of its day."""

    def __init__(self, whole: SilencePatience, at: float) -> None:
        self.off = whole.off
        self._whole = whole
        self._at = at

    def note(self, length: float, now: float) -> None:
        self._whole.note(length, self._at + now)

    def limit(self, now: float) -> float:
        return self._whole.limit(self._at + now)


def simulated(results: Results) -> bool:
    """A day of many nodes."""
    all_kinds = kinds(results.quick)
    hours = QUICK_HOURS if results.quick else HOURS
    results.settings |= {
        **assumed((*all_kinds, PAUSES)),
        "unreachable_limit_s": Config().unreachable_limit,
        "remembered_s": REMEMBERED,
        "hours": hours,
    }
    fine = True
    for name, (_, _, signs) in JOBS.items():
        came, before, now = _days(name, hours, all_kinds)
        for kind, times in came.items():
            results.count(f"{name}.{kind}", times)
        results.count(f"{name}.false_losses_before", before)
        results.count(f"{name}.false_losses", now)
        fine = fine and now <= before
        came, before, now = _days(name, hours, (*all_kinds, PAUSES))
        results.count(f"{name}.{PAUSES.name}", came[PAUSES.name])
        results.count(f"{name}.lost_with_them_before", before)
        results.count(f"{name}.lost_with_them", now)
        _crashes(results, name, signs)
    return fine


def _days(name: str, hours: float, all_kinds: Sequence[Kind]) -> tuple[Counter[str], int, int]:
    """Return the stumbles of all jobs, and how many nodes the two rules lost by them."""
    jobs, nodes, signs = JOBS[name]
    came, before, now = Counter[str](), 0, 0
    for job in range(jobs):
        one, lost_before, lost_now = Day(nodes, signs, hours, job).run(all_kinds)
        came += one
        before, now = before + lost_before, now + lost_now
    return came, before, now


def _crashes(results: Results, name: str, signs: Signs) -> None:
    """Add the times until a node that crashes is lost."""
    random_ = random.Random(0)
    walks = QUICK_WALKS if results.quick else WALKS
    patience = SilencePatience(Config().unreachable_limit)
    seen = [walk(Stumble("machine", NEVER), signs, patience, random_) for _ in range(walks)]
    results.metrics[f"{name}.crash_detect_before"] = summarise([one.before for one in seen], "s")
    results.metrics[f"{name}.crash_detect"] = summarise([one.now for one in seen], "s")


def outages(results: Results) -> bool:
    """One outage of one node by its length: the share of them that cost the node its place."""
    walks = QUICK_WALKS if results.quick else WALKS
    for length in LENGTHS:
        random_ = random.Random(0)
        both = [
            walk(
                Stumble("network", length),
                SMALL,
                SilencePatience(Config().unreachable_limit),
                random_,
            )
            for _ in range(walks)
        ]
        shares = (("before", [one.before for one in both]), ("now", [one.now for one in both]))
        for rule, when in shares:
            share = sum(each < NEVER for each in when) / walks
            results.once(f"outage_{length:g}s.lost_{rule}", share, "share")
    return True


def lab(results: Results) -> bool:
    """Crashes in a lab."""
    runs = results.runs or (QUICK_RUNS if results.quick else MIN_SAMPLES)
    return crashes(results, runs, tell)


CASES: Mapping[str, Callable[[Results], bool]] = {
    "simulated": simulated,
    "outages": outages,
    "lab": lab,
}


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases. Returns the exit code."""
    args = parser("detection", CASES).parse_args(argv)
    results = results_for("detection", args)
    fine = [CASES[case](results) for case in args.case or CASES]
    return finish(results, args) or int(not all(fine))


if __name__ == "__main__":
    raise SystemExit(main())
