"""The answer of ``robust-standby simulate``, as data. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from standby.simulate.assumed import GUESSES
from standby.simulate.events import (
    DAY,
    HOUR,
    MEASURED,
    Approach,
    Kind,
    SimulatedCluster,
    SimulatedTime,
    simulate,
)

CURVE_DAYS = (1, 7, 30, 60, 90)
BELOW = (99, 90, 50)


class StudyRow(NamedTuple):
    """One approach over all runs; ETTRs as shares."""

    name: str
    what: str
    ettr: float
    low: float
    high: float
    minutes_per_fault: float
    worst_hour: float  # of each run, on average
    shortages: float  # faults per run for which the pool had too few nodes
    curve: Mapping[str, float]  # cumulative ETTR by day


class Study(NamedTuple):
    """All approaches under the same faults, and ours in detail: seconds of one run, on average."""

    cluster: SimulatedCluster
    mix: str
    runs: int
    faults: float
    rows: tuple[StudyRow, ...]
    pools: Mapping[int, float]  # ETTR of ours
    causes: Mapping[str, float]
    phases: Mapping[str, float]
    hours: Mapping[int, float]  # of a run of ours with an ETTR below so many percent
    assumed: tuple[tuple[str, str], ...]  # what, and why


def accounts(
    approach: Approach, cluster: SimulatedCluster, mix: Sequence[Kind], seeds: Sequence[int]
) -> list[SimulatedTime]:
    """Return one run for each seed."""
    return [simulate(approach, cluster, mix, seed) for seed in seeds]


def study(
    cluster: SimulatedCluster,
    mix: Sequence[Kind],
    what: str,
    seeds: Sequence[int],
    approaches: Sequence[Approach],
) -> Study:
    """Simulate the approaches with the same seeds, and ours with other pools."""
    found = {one.name: accounts(one, cluster, mix, seeds) for one in approaches}
    own = found["ours"]
    of_ours = next(one for one in approaches if one.name == "ours")
    pools = {
        size: fmean(a.ettr for a in accounts(of_ours, cluster._replace(pool=size), mix, seeds))
        for size in sorted({0, 1, 2, 4, 8, 16, 32, cluster.pool})
    }
    return Study(
        cluster,
        what,
        len(seeds),
        fmean(account.faults for account in own),
        tuple(_row(one, found[one.name]) for one in approaches),
        pools,
        _mean(own, 0),
        _mean(own, 1),
        {
            percent: fmean(sum(100 * hour < percent for hour in run.hours()) for run in own)
            for percent in BELOW
        },
        tuple(_assumed(of_ours)),
    )


def _row(approach: Approach, runs: Sequence[SimulatedTime]) -> StudyRow:
    ettrs = [run.ettr for run in runs]
    lost = fmean((run.wall - run.productive) / 60.0 / max(1, run.faults) for run in runs)
    days = [day for day in CURVE_DAYS if day * DAY <= runs[0].wall]
    return StudyRow(
        approach.name,
        approach.what,
        fmean(ettrs),
        min(ettrs),
        max(ettrs),
        lost,
        fmean(run.worst() for run in runs),
        fmean(run.shortages for run in runs),
        {str(day): fmean(run.cumulative(day * DAY) for run in runs) for day in days},
    )


def _mean(runs: Sequence[SimulatedTime], part: int) -> dict[str, float]:
    sums: defaultdict[str, float] = defaultdict(float)
    for run in runs:
        for key, seconds in run.by(part).items():
            sums[key] += seconds / len(runs)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _assumed(approach: Approach) -> Iterator[tuple[str, str]]:
    """Yield the numbers of our approach that are in no record of ours, each with its source."""
    for name, time in approach.times():
        if time.basis != MEASURED:
            yield f"{name} {time.median:.4g} s", time.source
    yield from GUESSES


def gpu_hours(seconds: float, cluster: SimulatedCluster, gpus: int) -> float:
    """Return what all GPUs of the job together lose in this time."""
    return seconds / HOUR * cluster.nodes * gpus


def as_data(found: Study, gpus: int) -> dict[str, Any]:
    """The answer for JSON."""
    cluster = found.cluster

    def hours(parts: Mapping[str, float]) -> dict[str, float]:
        return {name: round(gpu_hours(s, cluster, gpus), 1) for name, s in parts.items()}

    return {
        "version": 1,
        **cluster._asdict(),
        "gpus_per_node": gpus,
        "mix": found.mix,
        "runs": found.runs,
        "faults_per_run": found.faults,
        **{row.name: {k: v for k, v in row._asdict().items() if k != "name"} for row in found.rows},
        "pools": {str(size): ettr for size, ettr in found.pools.items()},
        "gpu_hours_lost_by_cause": hours(found.causes),
        "gpu_hours_lost_by_phase": hours(found.phases),
        "hours_below_percent": {str(percent): n for percent, n in found.hours.items()},
        "assumed": dict(found.assumed),
    }
