"""Runs of the simulator, one for each seed."""

from __future__ import annotations

from collections.abc import Sequence

from bench.simulate.events import Approach, Kind, SimulatedCluster, SimulatedTime, simulate


def accounts(
    approach: Approach, cluster: SimulatedCluster, mix: Sequence[Kind], seeds: Sequence[int]
) -> list[SimulatedTime]:
    """Return one run for each seed."""
    return [simulate(approach, cluster, mix, seed) for seed in seeds]
