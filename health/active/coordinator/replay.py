"""Dual-phase replay: find the bad machine when only the whole job shows the fault. Pure.

ByteRobust (arXiv 2509.16293, section 6) replays the job in small worlds of m machines that keep
its pipeline and tensor parallelism and have less data parallelism, twice, grouped in two ways:
the bad machine is where the bad group of one meets that of the other. Here

- a machine keeps its stage of the pipeline in every round, so what it computes and with whom it
  talks stays as in the job: the second grouping is a diagonal, where the paper takes x mod n and
  has to give machines other stages. As there, two groups of the two rounds share one machine;
- the number of replicas need not be divisible: those left over sit out, and are tested next;
- fewer groups than machines in a group (PP > DP) take more rounds, one for each digit of the
  machine's number in its group, in base n;
- several bad machines: from the second round on all that are in question are put into different
  groups, each among proven machines. With n >= 4 two are named in at most three rounds;
- a fault that does not show every time: a group that failed has a bad machine for certain, one
  that went well only makes that less likely. In a bad group the machines that went well least
  often are in question, and rounds go on until some number of them in a row shows nothing.
  ``least_chance`` says what that number is worth.

What it cannot find: a fault that shows only with all machines (a full switch, the spine, one rank
too many for the memory of a store) or only after more steps than are replayed; one that needs the
data or the weights of the step at which it came; what makes every group fail, which is the
program. With one bad machine, no other machine is ever named, however rarely its fault shows. With
two whose faults show by chance, a healthy machine may be named if it meets them again and again:
simulated with 24 machines, in 2 % of the searches for two that show in four of five replays, in
8 % for two that show in every other one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from robust_slurm.text import counted

Group = tuple[int, ...]
MOST_FAILED = 16  # rounds with a failed group, after which the search ends undecided
CONFIRMED = 2
"""Failed groups needed to name a machine: a single one may be an accident, such as a port in use.
One more if no machine is in all of them: a healthy one may have met two bad ones in turn."""


class ReplayLayoutError(ValueError):
    """This job cannot be replayed in parts; the text says why, and what would help."""


class Layout(NamedTuple):
    """Machine x is stage ``x % unit`` of replica ``x // unit``."""

    unit: int
    """Machines of one replica of the model: PP where a machine is one (dp, pp) cell."""
    replicas: int
    """DP, as far as it goes over machines."""
    k: int
    """Replicas in a group."""

    @property
    def m(self) -> int:
        """Machines of a group."""
        return self.k * self.unit

    @property
    def n(self) -> int:
        """Groups; the machines of ``replicas % k`` replicas sit out."""
        return self.replicas // self.k

    @property
    def nodes(self) -> int:
        return self.unit * self.replicas

    @property
    def phases(self) -> int:
        """Rounds after which no two machines have been in the same groups: 2 where m <= n."""
        digits = 0
        while self.n**digits < self.m:
            digits += 1
        return 1 + digits


class Round(NamedTuple):
    """The result of one round; indices into ``groups``. Groups in neither set passed."""

    groups: tuple[Group, ...]
    bad: frozenset[int]
    unknown: frozenset[int] = frozenset()


class ReplayVerdict(NamedTuple):
    named: tuple[int, ...]
    undecided: tuple[int, ...]
    """One or more of these are bad."""
    untested: tuple[int, ...]


def layout(nodes: int, unit: int) -> Layout:
    """Divide the job into groups of as few replicas as have two machines, so that they talk to each
    other. ``unit``: machines that only together hold the model. Small groups leave few machines in
    question after the first round and start quickly. Raises ReplayLayoutError.
    """
    if unit < 1 or nodes < unit or nodes % unit:
        raise ReplayLayoutError(f"{nodes} machines cannot be divided into whole replicas of {unit}")
    replicas = nodes // unit
    if replicas < 2:
        raise ReplayLayoutError(
            f"the {nodes} machines hold one replica of the model: without data parallelism over "
            "machines there is nothing to make smaller, or to compare"
        )
    return Layout(unit, replicas, min(-(-2 // unit), replicas // 2))


def groups(layout: Layout, phase: int) -> tuple[Group, ...]:
    """The groups of a round that nothing is known for; phase 0: m consecutive machines.

    The machine at position i of a group plays stage i % unit. In phase j > 0 it moves on by the
    j-th digit (base n) of its position, so that machines which were together are together no more.
    """
    n, m = layout.n, layout.m
    found = [[0] * m for _ in range(n)]
    for x in range(n * m):
        block, at = divmod(x, m)
        shift = at // n ** (phase - 1) % n if phase else 0
        found[(block + shift) % n][at] = x
    return tuple(map(tuple, found))


def verdict(layout: Layout, rounds: Sequence[Round]) -> ReplayVerdict:
    """Judge all machines by the rounds so far."""
    good: Counter[int] = Counter()
    failed: list[frozenset[int]] = []
    for each in rounds:
        for number, group in enumerate(each.groups):
            if number in each.bad:
                failed.append(frozenset(group))
            elif number not in each.unknown:
                good.update(group)
    suspects = [_least(group, good) for group in failed]
    alone = {x for some in suspects if len(some) == 1 for x in some}
    one_is_enough = bool(failed) and bool(frozenset.intersection(*failed))
    proof = CONFIRMED if one_is_enough else CONFIRMED + 1
    named = {x for x in alone if _is_common(x, failed, proof)}
    question = {x for group in failed for x in group if not good[x]}
    for where, some in zip(failed, suspects, strict=True):
        if not named & where:
            question |= some
    untested = sorted(set(range(layout.nodes)).difference(good, *failed))
    return ReplayVerdict(tuple(sorted(named)), tuple(sorted(question - named)), tuple(untested))


def _least(group: Iterable[int], good: Counter[int]) -> frozenset[int]:
    """Return the members that passed least often."""
    fewest = min(good[x] for x in group)
    return frozenset(x for x in group if good[x] == fewest)


def _is_common(x: int, failed: Iterable[frozenset[int]], proof: int) -> bool:
    """True if at least ``proof`` groups with this machine failed, and share only this machine."""
    own = [group for group in failed if x in group]
    return len(own) >= proof and frozenset.intersection(*own) == {x}


def next_groups(layout: Layout, rounds: Sequence[Round]) -> tuple[Group, ...]:
    """The groups of the next round; () when too few machines are left for one.

    Machines in question are put into different groups, without untested partners and, as far as
    possible, without those that they failed with. Untested machines are placed before proven ones.
    Named ones sit out.
    """
    if not rounds:
        return groups(layout, 0)
    known = verdict(layout, rounds)
    unit = layout.unit
    left = Counter(dict.fromkeys(range(unit), layout.replicas))
    left.subtract(x % unit for x in known.named)
    usable = min(layout.n, min(left.values()) // layout.k)
    base = groups(layout, len(rounds) % layout.phases)
    usual = {x: number for number, group in enumerate(base) for x in group}
    seats: list[list[list[int]]] = [[[] for _ in range(unit)] for _ in range(usable)]
    held: list[list[int]] = [[] for _ in range(usable)]  # of those in question

    def has_room(number: int, x: int) -> bool:
        return number < usable and len(seats[number][x % unit]) < layout.k

    def rooms(x: int) -> list[int]:
        return [number for number in range(usable) if has_room(number, x)]

    for x in known.undecided:
        met = _met(x, rounds)
        stale = Counter(usual.get(y) for y in met.elements())

        def burden(g: int, x: int = x, met: Counter[int] = met, stale: Any = stale) -> Any:
            return len(held[g]), sum(met[y] for y in held[g]), stale[g], g != usual.get(x)

        if options := rooms(x):
            best = min(options, key=burden)
            held[best].append(x)
            seats[best][x % unit].append(x)
    for x in known.untested:
        if options := [g for g in rooms(x) if not held[g]]:
            seats[options[0]][x % unit].append(x)
    moved = []
    for x in sorted(set(range(layout.nodes)).difference(*known)):
        if has_room(usual.get(x, usable), x):
            seats[usual[x]][x % unit].append(x)
        else:
            moved.append(x)
    first = [0] * unit  # no group before this one has room
    for x in moved:
        stage = x % unit
        while first[stage] < usable and not has_room(first[stage], x):
            first[stage] += 1
        if first[stage] < usable:
            seats[first[stage]][stage].append(x)
    return tuple(tuple(stages[at % unit][at // unit] for at in range(layout.m)) for stages in seats)


def _met(x: int, rounds: Iterable[Round]) -> Counter[int]:
    """Count, for each other machine, the failed groups that it shared with this one."""
    failed = (each.groups[number] for each in rounds for number in each.bad)
    met = Counter(y for group in failed if x in group for y in group)
    del met[x]
    return met


def over(layout: Layout, rounds: Sequence[Round], quiet: int) -> str:
    """The reason to run no further round; "" if one is worth its time.

    ``quiet``: rounds in a row without a failed group, after which the search ends.
    """
    if not rounds:
        return ""
    last = rounds[-1]
    if len(last.unknown) == len(last.groups):
        return "no group finished in time"
    if len(last.bad | last.unknown) == len(last.groups):
        return "every group fails: the program is at fault, or cannot run in a smaller world"
    known = verdict(layout, rounds)
    showed = [number for number, each in enumerate(rounds) if each.bad]
    if showed and not known.undecided:
        return "all bad groups are explained"
    silent = len(rounds) - 1 - (showed[-1] if showed else -1)
    if silent >= quiet:
        return f"no group failed in {counted(silent, 'round')}"
    if len(showed) >= MOST_FAILED:
        return f"undecided after {counted(len(showed), 'round')} in which groups failed"
    return ""


# -- faults that do not show every time


def least_chance(replays: int, confidence: float = 0.95) -> float:
    """The highest chance per replay, at this confidence, of a fault that none of ``replays``
    showed."""
    return 1.0 - math.pow(1.0 - confidence, 1 / replays)
