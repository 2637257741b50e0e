"""A job on N nodes for some days, fault by fault: what each costs, by cause and by phase. Pure.

Faults of each kind come as a Poisson process. An approach answers a fault with a list of phases in
which nothing is trained; a node that leaves is replaced from a pool of standby nodes, which gets
another node a refill time later. A fault during a recovery is handled after it. Every fault has
random numbers of its own, so that two approaches meet the same faults, and a higher rate adds
faults to those of a lower one.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

DAY, HOUR = 86400.0, 3600.0
SAVING, START_UP = "saving every step", "start of the job"
MEASURED, SEEN, PUBLISHED, ASSUMED = "measured", "seen once", "published", "assumed"
MACHINE, CODE, PASSING = "machine", "code", "passing"  # what is behind a fault
WISH = "wish"  # Kind.shows of a stop on purpose: no step is repeated after it


class Time(NamedTuple):
    """Seconds at the median and at the 95th percentile, and where the two come from.

    Half of the draws are the median; the others have an exponential tail through the p95. The
    records hold only these two, and a median of 0 rules out a log-normal distribution.
    """

    median: float
    p95: float
    basis: str
    source: str

    def draw(self, dice: Random) -> float:
        """Draw one duration."""
        above = dice.random()
        if above >= 0.5 or self.p95 <= self.median:
            return self.median
        return self.median + (self.p95 - self.median) * math.log(0.5 / (above or 1e-12)) / math.log(
            10.0
        )

    @property
    def mean(self) -> float:
        """The mean of the draws."""
        return self.median + max(0.0, self.p95 - self.median) * 0.5 / math.log(10.0)

    def times(self, factor: float, why: str = "") -> Time:
        """Return this time multiplied by ``factor``, as ASSUMED; ``why`` is added to its source."""
        return Time(self.median * factor, self.p95 * factor, ASSUMED, self.source + why)


class Kind(NamedTuple):
    """A kind of fault. ``shows``: how it is seen, a key of Approach.detect.

    ``machine`` and ``code`` are the shares in which a bad machine or the job's code is the cause;
    all others pass by themselves. ``named``: the first evidence names the machine.
    """

    name: str
    shows: str
    per_1000: float  # per 1,000 node-days
    machine: float = 0.0
    code: float = 0.0
    named: bool = False
    nodes: int = 1


class SimulatedCluster(NamedTuple):
    """The job and its surroundings."""

    nodes: int
    days: float
    pool: int
    refill_h: float
    step_s: float


class Approach(NamedTuple):
    """A way to answer faults; ``assumed.py`` has the times.

    ``tries``: restarts in place before a machine that no evidence names is replaced, and before
    code is rolled back. ``evicts``: healthy nodes evicted with a bad one, by Kind.shows. ``short``:
    takes the place of ``replace`` if the pool has too few nodes. ``interval``: seconds between two
    saves, 0: each step.
    """

    name: str
    what: str
    detect: Mapping[str, Time]
    decide: Time
    stop: Time
    test: Mapping[str, Time]  # by Kind.name or Kind.shows; "again": before the last try; CODE
    replace: Time
    short: Time
    restore: Time
    start: Time
    save: Time
    interval: float
    durable: float  # s between checkpoints that survive the loss of several nodes
    tries: Mapping[str, int] = {}
    evicts: Mapping[str, int] = {}
    wrong: float = 0.0  # healthy nodes that leave, per fault
    pooled: bool = True

    def times(self) -> Iterator[tuple[str, Time]]:
        """Yield all times with their names."""
        yield from ((f"detect ({key})", time) for key, time in self.detect.items())
        yield from (("decide", self.decide), ("stop", self.stop))
        yield from ((f"test ({key})", time) for key, time in self.test.items())
        yield from (("replace", self.replace), ("replace, pool short", self.short))
        yield from (("restore", self.restore), ("start", self.start), ("save", self.save))


class SimulatedFault(NamedTuple):
    """One fault; ``number`` of its kind gives it its own random numbers."""

    at: float
    kind: Kind
    number: int


class Stretch(NamedTuple):
    """A time without training, from ``begin`` on, by phase."""

    begin: float
    cause: str
    phases: Mapping[str, float]

    @property
    def seconds(self) -> float:
        return math.fsum(self.phases.values())


class SimulatedTime(NamedTuple):
    """The time of one simulated job; ``lost`` by cause and phase sums to ``wall`` − productive."""

    wall: float
    productive: float
    lost: Mapping[tuple[str, str], float]
    stretches: tuple[Stretch, ...]
    faults: int
    shortages: int

    @property
    def ettr(self) -> float:
        """Productive time / wall time."""
        return self.productive / self.wall

    def by(self, part: int) -> dict[str, float]:
        """Sum the lost seconds by cause (0) or by phase (1), the largest first."""
        sums: defaultdict[str, float] = defaultdict(float)
        for key, seconds in self.lost.items():
            sums[key[part]] += seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def cumulative(self, until: float) -> float:
        """Return the ETTR from the start to ``until``; saving is spread over all of it."""
        return self._productive(0.0, until) / until

    def worst(self, window: float = HOUR) -> float:
        """Return the ETTR of the worst window of this length."""
        begins = [min(s.begin, self.wall - window) for s in self.stretches]
        return min(
            (self._productive(b, b + window) / window for b in begins if b >= 0), default=1.0
        )

    def hours(self) -> list[float]:
        """Return the ETTR of each hour, one after another."""
        lost = [0.0] * math.ceil(self.wall / HOUR)
        for stretch in self.stretches:
            at, end = stretch.begin, stretch.begin + stretch.seconds
            for hour in range(int(at / HOUR), len(lost)):
                part = min(end, (hour + 1) * HOUR) - at
                if part <= 0.0:
                    break
                lost[hour] += part
                at += part
        return [(1.0 - gone / HOUR) * self._share() for gone in lost]

    def _share(self) -> float:
        """Return the share of the time between stretches that saving leaves."""
        saving = sum(s for (cause, _), s in self.lost.items() if cause == SAVING)
        return self.productive / (self.productive + saving or 1.0)

    def _productive(self, begin: float, end: float) -> float:
        gone = math.fsum(
            max(0.0, min(end, s.begin + s.seconds) - max(begin, s.begin)) for s in self.stretches
        )
        return (end - begin - gone) * self._share()


def faults(mix: Sequence[Kind], cluster: SimulatedCluster, seed: int) -> list[SimulatedFault]:
    """Draw the faults of a job, in the order of time."""
    found = []
    for kind in mix:
        rate = kind.per_1000 / 1000.0 * cluster.nodes / DAY
        dice = Random(f"{seed}/{kind.name}")
        at, number = 0.0, 0
        while rate > 0.0 and (at := at + dice.expovariate(1.0) / rate) < cluster.days * DAY:
            found.append(SimulatedFault(at, kind, number))
            number += 1
    return sorted(found)


def respond(
    approach: Approach, kind: Kind, free: int, step_s: float, dice: Random
) -> tuple[dict[str, float], int, bool]:
    """Return the seconds of each phase, the standby nodes taken, and whether they were too few."""
    truth, wrong = dice.random(), dice.random() < approach.wrong
    cause = (
        MACHINE if truth < kind.machine else CODE if truth < kind.machine + kind.code else PASSING
    )
    vain = 0 if cause == MACHINE and kind.named else approach.tries.get(cause, 0)
    phases: defaultdict[str, float] = defaultdict(float)
    for again in range(vain + 1):
        phases["detect"] += approach.detect[kind.shows].draw(dice)
        for name in ("decide", "stop", "restore", "start"):
            phases[name] += getattr(approach, name).draw(dice)
        own = approach.test.get(kind.name) or approach.test.get(kind.shows)
        if own and again == 0:
            phases["test"] += own.draw(dice)
        last = approach.test.get(CODE if cause == CODE else "again")
        if last and again == vain and (vain or cause == CODE):
            phases["test"] += last.draw(dice)
    taken = kind.nodes + approach.evicts.get(kind.shows, 0) if cause == MACHINE else 0
    taken += int(wrong)
    several = kind.nodes > 1 and approach.durable > 0.0
    span = approach.durable if several else approach.interval
    steps = (0.5 + dice.random()) * step_s  # the step under way, often also the one being copied
    phases["redo"] += dice.random() * span + steps if kind.shows != WISH else 0.0
    short = taken > free and approach.pooled
    if taken:
        phases["replace"] += (approach.short if short else approach.replace).draw(dice)
    return dict(phases), taken, short


def simulate(
    approach: Approach,
    cluster: SimulatedCluster,
    mix: Sequence[Kind],
    seed: int = 0,
    given: Sequence[SimulatedFault] | None = None,
) -> SimulatedTime:
    """Run the job through the faults of the mix, or through those that are given."""
    wall = cluster.days * DAY
    begun = {"start": approach.start.median}
    stretches = [] if given is not None else [Stretch(0.0, START_UP, begun)]
    back: list[float] = []  # when nodes that were taken are replaced
    free, busy, short_of = cluster.pool, sum(s.seconds for s in stretches), 0
    coming = faults(mix, cluster, seed) if given is None else given
    for fault in coming:
        dice = Random(f"{seed}/{fault.kind.name}/{fault.number}")
        begin = max(fault.at, busy)
        if begin >= wall:
            break
        while back and back[0] <= begin:
            heapq.heappop(back)
            free += 1
        phases, taken, short = respond(approach, fault.kind, free, cluster.step_s, dice)
        for _ in range(min(free, taken) if approach.pooled else 0):
            heapq.heappush(back, begin + dice.expovariate(1.0) * cluster.refill_h * HOUR)
            free -= 1
        short_of += short
        stretch = _cut(Stretch(begin, fault.kind.name, phases), wall)
        stretches.append(stretch)
        busy = begin + stretch.seconds
    return _account(approach, cluster, stretches, len(coming), short_of)


def _cut(stretch: Stretch, wall: float) -> Stretch:
    """End a stretch with the simulated time."""
    share = min(1.0, (wall - stretch.begin) / (stretch.seconds or 1.0))
    return stretch._replace(phases={name: s * share for name, s in stretch.phases.items()})


def _account(
    approach: Approach,
    cluster: SimulatedCluster,
    stretches: Sequence[Stretch],
    count: int,
    short_of: int,
) -> SimulatedTime:
    wall = cluster.days * DAY
    lost: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stretch in stretches:
        for phase, seconds in stretch.phases.items():
            lost[stretch.cause, phase] += seconds
    training = wall - math.fsum(lost.values())
    period = approach.interval or cluster.step_s
    stall = training * approach.save.mean / (period + approach.save.mean)
    lost[SAVING, "save"] += stall
    return SimulatedTime(wall, training - stall, dict(lost), tuple(stretches), count, short_of)
