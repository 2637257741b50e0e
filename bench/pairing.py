"""Precision and speed of finding bad nodes by testing pairs: ``python -m bench.pairing``.

A simulation: no network is tested, the schedule and verdicts are the real ones (``Pairing``). 128
and 1,000 nodes under leaf switches of 16, of which 1 to 5 are bad; a pair runs at its slower
node's speed, 10 % less across leaves, times a normally distributed factor (noise 5 % or 10 %). A
case for each kind of fault:

``slow``          the node reaches 0.4 of a healthy one's bandwidth; slow is under 0.5
``wrong``         its data comes out wrong
``intermittent``  its data comes out wrong in every second pair
``baselines``     the same by measuring all pairs, and by one round of random pairs

Every combination has ``runs`` samples with a seed of their own. ``exact``: all bad nodes named and
nobody else; ``healthy_named``: some healthy node was; ``missed``: some bad node was not; ``found``:
share of the bad nodes named; ``told``: named or reported as undecided. Seconds are computed:
rounds times an assumed ``ROUND_S``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

from bench.common import Results, main
from health.active.judging.pairing import Pair, Pairing, PairResult

SIZES = (128, 1000)
NOISES = (0.05, 0.10)
BAD = (1, 2, 3, 4, 5)
RUNS, QUICK_RUNS = 60, 5
LEAF = 16
GBPS = 40.0
ACROSS = 0.9
ROUND_S = 5.0  # assumed: 2 s of measuring (level quick) and 3 s to set a communicator up


class Fault(NamedTuple):
    speed: float = 1.0
    wrong: bool = False
    often: float = 1.0
    share: float = 0.5


FAULTS = {
    "slow": Fault(speed=0.4),
    "wrong": Fault(wrong=True),
    "intermittent": Fault(wrong=True, often=0.5),
}


class Outcome(NamedTuple):
    rounds: int
    named: frozenset[str]
    told: frozenset[str]
    bad: frozenset[str]


class World:
    """Nodes, some of them bad, that can be measured."""

    def __init__(self, size: int, bad: int, fault: Fault, noise: float, seed: str) -> None:
        self.chance = random.Random(seed)
        self.nodes = [f"n{i}" for i in range(size)]
        self.leaf_of = {node: f"leaf{i // LEAF}" for i, node in enumerate(self.nodes)}
        self.bad = frozenset(self.chance.sample(self.nodes, bad))
        self.fault = fault
        self.noise = noise

    def measure(self, pair: Pair) -> PairResult:
        hit = any(node in self.bad and self.chance.random() < self.fault.often for node in pair)
        far = self.leaf_of[pair.one] != self.leaf_of[pair.other]
        speed = GBPS * (ACROSS if far else 1.0) * (self.fault.speed if hit else 1.0)
        speed = max(0.0, speed * self.chance.gauss(1.0, self.noise))
        return PairResult(*pair, speed, hit and self.fault.wrong, "")

    def is_bad(self, pair: Pair) -> bool:
        """True by a standard known beforehand, as the baselines have it."""
        result = self.measure(pair)
        far = self.leaf_of[pair.one] != self.leaf_of[pair.other]
        limit = self.fault.share * GBPS * (ACROSS if far else 1.0)
        return result.wrong or (result.gbps or 0.0) < limit


def ours(world: World) -> Outcome:
    pairing = Pairing(
        world.nodes,
        leaf_of=world.leaf_of,
        share=world.fault.share,
        seed=world.chance.randrange(2**32),
    )
    while pairs := pairing.next_round():
        pairing.record(world.measure(pair) for pair in pairs)
    found = pairing.verdict()
    named = frozenset(found.named)
    return Outcome(pairing.rounds, named, named | frozenset(found.undecided), world.bad)


def all_pairs(world: World) -> Outcome:
    """Pair every machine with every other: bad are those that fail with a quarter of the others.

    Only the pairs with a bad node are drawn: two healthy ones would have to be bad by noise alone.
    """
    named = frozenset(
        node
        for node in world.bad
        if 4 * sum(world.is_bad(Pair(node, other)) for other in world.nodes if other != node)
        >= len(world.nodes) - 1
    )
    return Outcome(len(world.nodes) - 1, named, named, world.bad)


def one_round(world: World) -> Outcome:
    """One round of random pairs: both nodes of a bad pair are blamed."""
    nodes = list(world.nodes)
    world.chance.shuffle(nodes)
    pairs = [Pair(one, other) for one, other in zip(nodes[::2], nodes[1::2], strict=True)]
    named = frozenset(node for pair in pairs if world.is_bad(pair) for node in pair)
    return Outcome(1, named, named, world.bad)


def measure(results: Results, prefix: str, outcomes: Iterable[Outcome]) -> None:
    found = list(outcomes)
    results.add(f"{prefix}.rounds", [float(o.rounds) for o in found], "rounds")
    results.add(f"{prefix}.seconds", [o.rounds * ROUND_S for o in found], "s")
    results.ratios |= {
        f"{prefix}.exact": fmean(o.named == o.bad for o in found),
        f"{prefix}.healthy_named": fmean(not o.named <= o.bad for o in found),
        f"{prefix}.missed": fmean(not o.bad <= o.named for o in found),
        f"{prefix}.found": fmean(len(o.named & o.bad) / len(o.bad) for o in found),
        f"{prefix}.told": fmean(len(o.told & o.bad) / len(o.bad) for o in found),
    }


def _runs(results: Results) -> range:
    results.settings |= {
        "round_s": f"{ROUND_S:g}, assumed",
        "runs": results.runs or (QUICK_RUNS if results.quick else RUNS),
        "nodes": f"in leaves of {LEAF}",
    }
    return range(int(results.settings["runs"]))


def fault(name: str, results: Results) -> None:
    """Our schedule against one kind of fault."""
    runs = _runs(results)
    for size, noise, bad in product(SIZES, NOISES, BAD):
        case = f"{name}.{size}.noise{round(100 * noise)}.bad{bad}"
        worlds = (World(size, bad, FAULTS[name], noise, f"{case}.{run}") for run in runs)
        measure(results, case, map(ours, worlds))


def baselines(results: Results) -> None:
    """Measure other schedules, at the larger noise."""
    runs = _runs(results)
    noise = NOISES[-1]
    others = {"all_pairs": all_pairs, "one_round": one_round}
    for (who, judge), name, size, bad in product(others.items(), FAULTS, SIZES, (1, 5)):
        case = f"{who}.{name}.{size}.noise{round(100 * noise)}.bad{bad}"
        worlds = (World(size, bad, FAULTS[name], noise, f"{case}.{run}") for run in runs)
        measure(results, case, map(judge, worlds))


CASES: dict[str, Callable[[Results], None]] = {
    **{name: partial(fault, name) for name in FAULTS},
    "baselines": baselines,
}

if __name__ == "__main__":
    raise SystemExit(main("pairing", CASES))
