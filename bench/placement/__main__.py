"""The spread of groups by our placement and by others: ``python -m bench.placement``.

Cases ``small``, ``medium``, ``large``: Arnold's three settings (arXiv 2509.15940), of nodes in
minipods and a job in it. Every sample is a cluster of its own, part of which other jobs occupy: the
paper does not say which part, so between none and all that the job leaves, unevenly over minipods.
In minipods, smaller is better: alpha * the worst DP group's spread + (1 - alpha) * the worst PP
group's. All algorithms see the same clusters; ``X/ours`` is the spread by X divided by that of
ours on the same cluster. Case ``huge``: 2,000 nodes, how long the heuristic takes and how far it is
from the bound, in 20, 63 and 125 minipods (the last two as many as leaf switches may be).
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

from bench.common import MIN_SAMPLES, Results, main
from bench.placement.baselines import BASELINES
from bench.placement.exact import arnold, exact
from standby.placement.bound import bound
from standby.placement.fill import fill, measured
from standby.placement.place import cells_of
from standby.placement.spread import groups, spread

ALPHAS = (0.0, 0.3, 0.5)
GPUS = 8  # of a node
SOLVER = 5.0  # s for each program
TOLERANCE = 1e-9


class Setting(NamedTuple):
    minipods: int
    nodes: int
    dp: int
    tp: int
    pp: int

    @property
    def places(self) -> int:
        return self.dp * self.tp * self.pp // GPUS


SETTINGS = {
    "small": Setting(3, 18, 12, 4, 2),
    "medium": Setting(5, 438, 24, 4, 8),
    "large": Setting(11, 1019, 46, 8, 8),
}
HUGE = [Setting(pods, 2400, 125, 8, 16) for pods in (20, 63, 125)]


def cluster(setting: Setting, chance: random.Random) -> list[int]:
    """Free nodes by minipod, enough for the job."""
    each = [
        setting.nodes // setting.minipods + (i < setting.nodes % setting.minipods)
        for i in range(setting.minipods)
    ]
    busy = chance.uniform(0.0, 1.0) * (setting.nodes - setting.places)
    # Uneven: every minipod has its own chance to be taken.
    pull = [chance.uniform(0.1, 1.0) for _ in each]
    free = list(each)
    for _ in range(int(busy)):
        pod = chance.choices(range(len(free)), [p * n for p, n in zip(pull, free, strict=True)])[0]
        free[pod] -= 1
    return free


def compare(setting: Setting, name: str, results: Results) -> None:
    """Print each method's weighted spread on the same clusters."""
    runs = results.runs or (2 if results.quick else MIN_SAMPLES)
    # Megatron's order of ranks (tensor fastest, then data), and the one with pipelines consecutive.
    usual = {"pp": setting.pp, "dp": setting.dp, "tp": setting.tp}
    turned = {"dp": setting.dp, "pp": setting.pp, "tp": setting.tp}
    jobs = [groups(mesh, GPUS, setting.places) for mesh in (usual, turned)]
    cells = cells_of(jobs[0], setting.places)
    if cells is None:
        raise RuntimeError(f"{name}: the job is no grid")
    for alpha in ALPHAS:
        chance = random.Random(name)
        found: dict[str, list[float]] = defaultdict(list)
        for _ in range(runs):
            room = cluster(setting, chance)
            began = time.perf_counter()
            ours = fill(cells.rows, cells.columns, room, alpha)
            found["ours_s"].append(time.perf_counter() - began)
            found["ours"].append(ours.weighted(alpha))
            placed = [str(ours.grid[row][column]) for row, column in cells.at]
            check = spread(jobs[0], placed)
            if (check.dp, check.pp) != (ours.dp, ours.pp):
                raise RuntimeError(f"{name}: spread {check} where {ours.dp}, {ours.pp} was said")
            best = []
            for baseline, choose in BASELINES.items():
                chosen = [str(j) for j in choose(room, setting.places, chance)]
                found[baseline].append(spread(jobs[0], chosen).weighted(alpha))
                best += [spread(job, chosen).weighted(alpha) for job in jobs]
            found["best-baseline"].append(min(best))
            began = time.perf_counter()
            theirs = arnold(cells.rows, cells.columns, room, alpha, SOLVER)
            found["arnold_s"].append(time.perf_counter() - began)
            if theirs is None:
                raise RuntimeError(f"{name}: Arnold's program has no answer after {SOLVER} s")
            found["arnold"].append(theirs.weighted(alpha))
            if name == "large":  # the exact program takes too long there
                least = bound(cells.rows, cells.columns, room, alpha)
            else:
                least = exact(cells.rows, cells.columns, room, alpha, SOLVER).bound
            found["bound"].append(least)
        _add(results, f"{name}.alpha{alpha:g}", found)
    results.settings[f"{name}"] = (
        f"{setting.nodes} nodes in {setting.minipods} minipods, job of {setting.places} "
        f"(DP {setting.dp}, TP {setting.tp}, PP {setting.pp})"
    )


def _add(results: Results, prefix: str, found: dict[str, list[float]]) -> None:
    for who, values in found.items():
        results.add(f"{prefix}.{who}", values, "s" if who.endswith("_s") else "minipods")
    for who in (*BASELINES, "best-baseline", "arnold"):
        ratios = [a / b for a, b in zip(found[who], found["ours"], strict=True)]
        results.ratios[f"{prefix}.{who}/ours.mean"] = fmean(ratios)
        results.ratios[f"{prefix}.{who}/ours.max"] = max(ratios)
    _gap(results, prefix, found["ours"], found["bound"])


def _gap(results: Results, prefix: str, ours: Sequence[float], least: Sequence[float]) -> None:
    """Add the distance from the best: 1 is proven to be the best."""
    gaps = [a / b for a, b in zip(ours, least, strict=True)]
    results.ratios[f"{prefix}.ours/bound.mean"] = fmean(gaps)
    results.ratios[f"{prefix}.ours/bound.max"] = max(gaps)
    results.ratios[f"{prefix}.ours proven best"] = fmean(gap <= 1 + TOLERANCE for gap in gaps)


def huge(results: Results) -> None:
    """2,000 nodes: time, and distance to the bound."""
    runs = results.runs or (1 if results.quick else MIN_SAMPLES)
    for setting, alpha in product(HUGE, ALPHAS):
        chance = random.Random("huge")
        spent, ours, least = [], [], []
        for _ in range(runs):
            room = cluster(setting, chance)
            began = time.perf_counter()
            found = fill(setting.dp, setting.pp, room, alpha)
            spent.append(time.perf_counter() - began)
            ours.append(measured(found.grid).weighted(alpha))
            least.append(bound(setting.dp, setting.pp, room, alpha))
        case = f"huge.{setting.minipods}.alpha{alpha:g}"
        results.add(f"{case}.ours_s", spent, "s")
        _gap(results, case, ours, least)


CASES: dict[str, Callable[[Results], None]] = {
    **{name: partial(compare, setting, name) for name, setting in SETTINGS.items()},
    "huge": huge,
}

if __name__ == "__main__":
    raise SystemExit(main("placement", CASES))
