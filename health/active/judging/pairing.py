"""The pairs of nodes in each round, and the nodes that their results prove bad. Pure.

Round 1 pairs everybody, inside a leaf switch first, so that a slow uplink is not blamed on a node,
and suspects with others. Then only what is open is tested: a node of a bad pair, one that could not
start and the odd one out meet a node that has passed, of their own leaf first. Nobody meets the
same partner twice.

A pair is *bad* if its data came out wrong, or if it was slow: below the floor, else below a share
of what the best tenth of the nodes reach with their best partner (so one odd measurement sets no
standard). Not the median of the pairs: a healthy node is as slow as its partner, so 5 bad ones of
16 slow 5 of 8 pairs. Under STANDARD pairs only wrong data counts.

A node is named by two bad pairs with different partners that passed elsewhere, if fewer passed. One
would do if a measurement could not err; a moment's congestion does not repeat itself with another
partner. What many nodes of a run show at once has one shared cause, and names none of them.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

ROUNDS = 3
STANDARD = 3
"""Measured pairs under which the best of them says nothing."""
ENOUGH = 2
"""Bad pairs that name a node; failed starts that make an error."""
FEW = 0.25
"""Share of the nodes (at least one): if more would be named for speed, there are two kinds."""
LEAF = 3
"""Bad nodes of one leaf switch from which on, if they are most of it, the switch is suspected."""


class Pair(NamedTuple):
    one: str
    other: str


class PairResult(NamedTuple):
    """``gbps``: bus bandwidth in 1e9 bytes/s. ``wrong``: the data came out wrong (``evidence``:
    how). ``error``: it could not be started or finished, which proves nothing about either node."""

    one: str
    other: str
    gbps: float | None
    wrong: bool
    error: str
    evidence: str = ""

    @property
    def measured(self) -> bool:
        right = not self.wrong and not self.error
        return right and self.gbps is not None and math.isfinite(self.gbps)


class PairVerdict(NamedTuple):
    """``named``: bad nodes with a line for each bad pair. ``cleared``: in a pair that passed, and
    nothing speaks against them. ``undecided``: why, by node. ``errors``: could not be tested, by
    node. Every node is in exactly one. ``median_gbps``: of all pairs with right data."""

    named: dict[str, tuple[str, ...]]
    cleared: frozenset[str]
    undecided: dict[str, str]
    errors: dict[str, str]
    median_gbps: float | None


class _Bad(NamedTuple):
    why: str
    wrong: bool
    far: bool


class _Facts:
    """The results by node, then by partner."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.passed: dict[str, dict[str, bool]] = {node: {} for node in nodes}  # across leaves?
        self.bad: dict[str, dict[str, _Bad]] = {node: {} for node in nodes}
        self.errors: dict[str, dict[str, str]] = {node: {} for node in nodes}

    def proofs(self, node: str) -> list[_Bad]:
        """The bad pairs with partners that passed elsewhere, if they are enough to name it."""
        found = [bad for partner, bad in self.bad[node].items() if self.passed[partner]]
        return found if len(found) >= max(ENOUGH, 1 + len(self.passed[node])) else []

    def contradicted(self, node: str) -> list[_Bad]:
        """Wrong data of this node and a partner neither of which is to blame. One slow moment is
        forgiven."""
        if not self.passed[node] or self.proofs(node):
            return []
        return [
            bad
            for partner, bad in self.bad[node].items()
            if bad.wrong and self.passed[partner] and not self.proofs(partner)
        ]

    def unstartable(self, node: str) -> bool:
        """True if it could not start with two partners, one of which passed elsewhere."""
        failed = self.errors[node]
        some = any(self.passed[partner] for partner in failed)
        return not self.passed[node] and len(failed) >= ENOUGH and some


class Pairing:
    """A state machine: ``next_round``, run its pairs, ``record``, until there is no pair.

    ``floor_gbps`` (1e9 bytes/s): what a pair must reach; without it ``share`` of the best.
    The same ``seed`` and results give the same rounds.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        *,
        suspects: Sequence[str] = (),
        leaf_of: Mapping[str, str] = {},
        floor_gbps: float | None = None,
        share: float = 0.5,
        seed: int = 0,
    ) -> None:
        self._nodes = list(dict.fromkeys(nodes))
        self._suspects = set(suspects)
        self._leaf_of = dict(leaf_of)
        self._floor = floor_gbps
        self._share = share
        self._chance = random.Random(seed)
        self._met: dict[str, set[str]] = {node: set() for node in self._nodes}
        self._results: list[PairResult] = []
        self.rounds = 0

    def next_round(self) -> list[Pair]:
        """Pairs to run at once, each node in at most one; empty when it is over."""
        if self.rounds == ROUNDS:
            return []
        pairs = self._again() if self.rounds else self._first()
        self.rounds += bool(pairs)
        for one, other in pairs:
            self._met[one].add(other)
            self._met[other].add(one)
        return pairs

    def record(self, results: Iterable[PairResult]) -> None:
        """Take the results of the round that runs: of each pair, also of one that failed."""
        self._results += results

    def _first(self) -> list[Pair]:
        nodes = self._shuffled(self._nodes)
        nodes.sort(key=lambda node: node not in self._suspects)
        return self._match(nodes, nodes, apart=True)

    def _again(self) -> list[Pair]:
        facts = self._facts()
        left = [n for n in self._nodes if not facts.proofs(n) and not facts.unstartable(n)]
        left = self._shuffled(left)
        left.sort(key=lambda node: len(self._met[node]))
        proven = [node for node in left if facts.passed[node]]
        if not proven or (self._limit() is None and len(self._nodes) > ENOUGH):
            return self._match(left, left)
        todo = [n for n in left if not facts.passed[n] or facts.contradicted(n)]
        pairs = self._match(todo, [node for node in proven if node not in todo])
        busy = {node for pair in pairs for node in pair}
        alone = [node for node in todo if node not in busy]
        return pairs + self._match(alone, alone)

    def _match(self, ones: list[str], others: list[str], apart: bool = False) -> list[Pair]:
        """Pair ``ones``, in order, with ``others`` that they have not met: of the own leaf first,
        then the rest. ``apart``: suspects not with each other, if there is a choice."""
        pairs: list[Pair] = []
        free = dict.fromkeys(others)
        busy: set[str] = set()
        for near in (True, False):
            by_leaf: dict[str, list[str]] = {}
            for node in reversed(free):
                by_leaf.setdefault(self._leaf_of.get(node, ""), []).append(node)
            for one in ones:
                if one in busy:
                    continue
                own = self._leaf_of.get(one, "")
                places = [own] if near else [own, *by_leaf]
                found = self._partner(one, places, by_leaf, free, apart)
                if found is not None:
                    pairs.append(Pair(one, found))
                    busy |= {one, found}
                    free.pop(one, None)
                    free.pop(found, None)
        return pairs

    def _partner(
        self,
        one: str,
        leaves: Iterable[str],
        by_leaf: Mapping[str, list[str]],
        free: Mapping[str, None],
        apart: bool,
    ) -> str | None:
        second = None
        for leaf in leaves:
            for node in reversed(by_leaf.get(leaf, ())):
                if node == one or node not in free or node in self._met[one]:
                    continue
                if not (apart and one in self._suspects and node in self._suspects):
                    return node
                second = second or node
        return second

    def _shuffled(self, nodes: Iterable[str]) -> list[str]:
        made = list(nodes)
        self._chance.shuffle(made)
        return made

    # -- the results

    def _far(self, one: str, other: str) -> bool:
        """True if they hang on different leaf switches. Nodes of unknown leaf count as one leaf."""
        return self._leaf_of.get(one, "") != self._leaf_of.get(other, "")

    def _limit(self) -> float | None:
        """The least bandwidth of a pair; None: not known yet."""
        if self._floor is not None:
            return self._floor
        right = [result for result in self._results if result.measured]
        if len(right) < STANDARD:
            return None
        best: dict[str, float] = {}
        for result in right:
            for node in (result.one, result.other):
                best[node] = max(best.get(node, 0.0), result.gbps or 0.0)
        return self._share * sorted(best.values(), reverse=True)[len(best) // 10]

    def _facts(self) -> _Facts:
        limit, facts = self._limit(), _Facts(self._nodes)
        for result in self._results:
            far = self._far(result.one, result.other)
            for node, partner in ((result.one, result.other), (result.other, result.one)):
                if result.wrong:
                    why = f"with {partner}: {result.evidence or 'the data came out wrong'}"
                    facts.bad[node][partner] = _Bad(why, True, far)
                elif not result.measured or result.gbps is None:
                    why = f"with {partner}: {result.error or 'no bandwidth was measured'}"
                    facts.errors[node][partner] = why
                elif limit is not None and result.gbps < limit:
                    why = f"with {partner}: {result.gbps:.3g} GB/s, at least {limit:.3g} expected"
                    facts.bad[node][partner] = _Bad(why, False, far)
                else:
                    facts.passed[node][partner] = far
        return facts

    def verdict(self) -> PairVerdict:
        """The verdict so far. A node without any result yet is undecided."""
        facts = self._facts()
        found = PairVerdict({}, frozenset(), {}, {}, self._median())
        cleared = set()
        for node in self._nodes:
            proofs, passed = facts.proofs(node), facts.passed[node]
            doubts = facts.contradicted(node)
            if proofs and not all(passed.values()) and all(bad.far for bad in proofs):
                found.undecided[node] = (
                    f"good inside its leaf switch, bad across ({_lines(proofs)}): test the "
                    "switch's uplinks"
                )
            elif proofs:
                found.named[node] = tuple(bad.why for bad in proofs)
            elif doubts:
                found.undecided[node] = (
                    f"{_lines(doubts)}; but both are good with others: one of them fails "
                    "intermittently; test them longer"
                )
            elif passed:
                cleared.add(node)
            elif facts.errors[node]:
                found.errors[node] = "; ".join(facts.errors[node].values())
            elif facts.bad[node]:
                found.undecided[node] = (
                    f"bad ({_lines(facts.bad[node].values())}), but that may be the partner's "
                    "fault: test it with nodes that are known to be good"
                )
            else:
                found.undecided[node] = (
                    "not judged: no partner or no time was left; test it with another node"
                )
        self._forgive_shared(facts, found)
        return found._replace(cleared=frozenset(cleared))

    def _forgive_shared(self, facts: _Facts, found: PairVerdict) -> None:
        """Many at once: a leaf switch, two kinds of machine, two networks."""
        slow = [
            node
            for node, bad in facts.bad.items()
            if bad and not facts.passed[node] and not any(one.wrong for one in bad.values())
        ]
        size = Counter(self._leaf_of.get(node, "") for node in self._nodes)
        bad = Counter(self._leaf_of.get(node, "") for node in found.named)
        for node in list(found.named):
            leaf = self._leaf_of.get(node, "")
            if leaf and len(size) > 1 and bad[leaf] >= LEAF and 2 * bad[leaf] > size[leaf]:
                found.undecided[node] = (
                    f"most nodes of leaf switch {leaf} are bad in pairs ({found.named[node][0]}): "
                    "test the switch and its uplinks before blaming the nodes"
                )
            elif node in slow and len(slow) > max(1, int(FEW * len(self._nodes))):
                found.undecided[node] = (
                    f"slow ({'; '.join(found.named[node])}), but so are {len(slow)} of "
                    f"{len(self._nodes)} nodes: two kinds of machine, or two networks?"
                )
            else:
                continue
            del found.named[node]

    def _median(self) -> float | None:
        speeds = [result.gbps for result in self._results if result.measured]
        return median(speed for speed in speeds if speed is not None) if speeds else None


def _lines(bad: Iterable[_Bad]) -> str:
    return "; ".join(entry.why for entry in bad)


class PairKind(NamedTuple):
    """The properties that two pairs must share for their bandwidths to be comparable."""

    backend: str
    models: tuple[str, ...]
    devices: int

    @property
    def share(self) -> float:
        """The share of the best bandwidth that a pair must reach. NCCL's between healthy nodes
        is steady, and a NIC that is missing or half as wide leaves half of it. Gloo's threads share
        their cores with whatever else runs: healthy pairs were measured to differ by a factor of 3.
        """
        return 0.5 if self.backend == "nccl" else 0.2

    def __str__(self) -> str:
        return f"{self.devices} x {', '.join(self.models) or 'unknown'} ({self.backend})"


class Pairings:
    """A pairing for each kind of node, all of them at once; used as one ``Pairing`` is."""

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
