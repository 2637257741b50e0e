"""Pairs of nodes of one kind only: bandwidths between different kinds do not compare. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from health.active.judging.blame import STANDARD
from health.active.judging.fleet import Baselines, limit
from health.active.judging.pairing import Pair, Pairing, PairResult, PairVerdict
from health.active.judging.speed import FLEET_FAIL
from health.active_tests import Measured

# The share of the pairs' typical bandwidth that a pair must reach. NCCL's bandwidth between healthy
# nodes with GPUs is steady; a NIC that is missing or half as wide leaves half of it.
SHARE_GPU = 0.5
# Gloo's threads share their cores with whatever else runs on the node: healthy pairs were measured
# to differ by a factor of 3. Less than a fifth is a link, not a busy core.
SHARE_CPU = 0.2


class PairKind(NamedTuple):
    """The properties that two pairs must share for their bandwidths to be comparable."""

    backend: str
    models: tuple[str, ...]
    devices: int

    @property
    def share(self) -> float:
        return SHARE_GPU if self.backend == "nccl" else SHARE_CPU

    def __str__(self) -> str:
        return f"{self.devices} x {', '.join(self.models) or 'unknown'} ({self.backend})"


def groups(kinds: Mapping[str, PairKind]) -> dict[PairKind, list[str]]:
    """The nodes of each kind, in their order."""
    found: dict[PairKind, list[str]] = {}
    for node, kind in kinds.items():
        found.setdefault(kind, []).append(node)
    return found


def floor_gbps(kind: PairKind, nodes: int, baselines: Baselines) -> float | None:
    """Return the bandwidth in GB/s below which a pair is slow, from the fleet's results.

    None where the run's own pairs are enough for a standard, or the fleet's results are too few.
    """
    if nodes >= 2 * STANDARD:
        return None
    known = [
        baselines.usual(Measured("pair", "", model=model), "busbw_gbps", kind.devices)
        for model in kind.models
    ]
    usual = [spread.p50 for spread in known if spread and limit(spread) is not None]
    share = FLEET_FAIL if kind.backend == "nccl" else SHARE_CPU
    return share * min(usual) if usual and len(usual) == len(kind.models) else None


class Pairings:
    """A pairing for each kind, all of them at once; used as one ``Pairing`` is."""

    def __init__(self, pairings: Sequence[Pairing]) -> None:
        self._pairings = pairings
        self._in: dict[Pair, Pairing] = {}

    def next_round(self) -> list[Pair]:
        """Pairs to run at once; empty when all are over."""
        self._in = {pair: pairing for pairing in self._pairings for pair in pairing.next_round()}
        return list(self._in)

    def record(self, results: Iterable[PairResult]) -> None:
        """Take results of the round that runs. KeyError for a pair that is not in it."""
        for result in results:
            self._in[Pair(result.one, result.other)].record([result])

    def verdict(self) -> PairVerdict:
        """Return the verdict on all nodes; ``median_gbps`` only where there is one kind."""
        found = [pairing.verdict() for pairing in self._pairings]
        return PairVerdict(
            {node: lines for one in found for node, lines in one.named.items()},
            frozenset[str]().union(*(one.cleared for one in found)),
            {node: text for one in found for node, text in one.undecided.items()},
            {node: text for one in found for node, text in one.errors.items()},
            found[0].median_gbps if len(found) == 1 else None,
        )
