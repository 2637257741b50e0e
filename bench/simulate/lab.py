"""The ETTR of a soak of bench.faults, from its faults and what they cost in another soak."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import permutations
from random import Random
from typing import Any

from bench.common import REPOSITORY, Results
from bench.simulate.approaches import ours
from bench.simulate.assumed import NONE
from bench.simulate.checks import Check
from bench.simulate.events import DAY, Kind, SimulatedCluster, SimulatedFault, Time, simulate

RECORDS = REPOSITORY / "docs" / "bench"
POINTS = 0.02
CROWDED = 10.0  # load per core, above which each fault costs what the load makes of it
STEP = 1e-6  # what is done again is in the cost of each fault already
Metrics = Mapping[str, Mapping[str, Any]]


def soaks() -> dict[str, Mapping[str, Any]]:
    """Return all soaks on record, by name."""
    paths = sorted(RECORDS.glob("soak-*.json"))
    return {path.stem: json.loads(path.read_text()) for path in paths}


def predictions(results: Results) -> list[Check]:
    """Predict each soak from each other one that recorded what its faults cost.

    A pair of which one was made on a crowded machine and the other was not is shown, not judged.
    """
    records = soaks()
    found: dict[str, Metrics] = {name: record["metrics"] for name, record in records.items()}
    crowded = {name for name, record in records.items() if _crowded(record["machine"])}
    checks = []
    for source, target in permutations(found, 2):
        if not _costs(found[source]):
            continue
        ettr = predict(found[source], found[target])
        results.once(f"lab.{target}.from.{source}", ettr, "share")
        if (source in crowded) != (target in crowded):
            continue
        seen = float(found[target]["soak.ettr"]["median"])
        checks.append(Check(f"{target} from {source}", ettr, seen, POINTS, points=True))
    return checks


def _crowded(machine: Mapping[str, Any]) -> bool:
    return bool(machine["load_1min"] > CROWDED * machine["cores"])


def _costs(soak: Metrics) -> dict[str, float]:
    end = ".lost_mean_s"
    return {key.removesuffix(end): soak[key]["median"] for key in soak if key.endswith(end)}


def _counts(soak: Metrics) -> dict[str, int]:
    end = ".gap_s"
    return {key.removesuffix(end): int(soak[key]["n"]) for key in soak if key.endswith(end)}


def _seconds(soak: Metrics) -> float:
    return float(soak["soak.minutes"]["median"]) * 60.0


def _slow(soak: Metrics) -> float:
    """Return the share of the time without a fault that steps slower than the median lost."""
    costs, wall = _costs(soak), _seconds(soak)
    faults = sum(costs[kind] * count for kind, count in _counts(soak).items())
    lost = wall * (1.0 - float(soak["soak.ettr"]["median"]))
    return max(0.0, (lost - faults) / (wall - faults))


def predict(source: Metrics, target: Metrics) -> float:
    """Return the ETTR of ``target``: its faults, each at the cost that it had in ``source``.

    The share that the source's other time lost to slow steps is lost as well. A kind that the
    source has not seen costs what its kinds cost on average.
    """
    costs = _costs(source)
    usual = sum(costs.values()) / len(costs)
    counts = _counts(target)
    order = [kind for kind, count in counts.items() for _ in range(count)]
    Random(0).shuffle(order)
    wall = _seconds(target)
    spent = [costs.get(kind, usual) for kind in order]
    pause = max(0.0, wall - sum(spent)) / (len(order) + 1)
    at, given = 0.0, []
    for number, (kind, cost) in enumerate(zip(order, spent, strict=True)):
        at += pause
        given.append(SimulatedFault(at, Kind(kind, kind, 0.0), number))
        at += cost
    slow = _slow(source)
    stall = STEP * slow / (1.0 - slow)
    every = {kind: _time(costs.get(kind, usual)) for kind in counts}
    approach = ours(4)._replace(
        detect=every, decide=NONE, stop=NONE, test={}, restore=NONE, start=NONE, wrong=0.0,
        save=_time(stall),
    )  # fmt: skip
    return simulate(approach, SimulatedCluster(4, wall / DAY, 0, 1.0, STEP), (), 0, given).ettr


def _time(seconds: float) -> Time:
    return Time(seconds, seconds, "measured", "")
