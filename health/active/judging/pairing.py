"""The pairs of nodes in each round, chosen to tell a bad node from its partner.

Pure; standard library only; knows no time and no network. The rules of proof are in ``blame.py``.

Round 1 pairs everybody, inside a leaf switch first, so that a slow uplink is not blamed on a node,
and suspects with others. From round 2 on only what is open is tested: a node of a bad pair, one
that could not start, and the odd one out of round 1 meet a proven node (of their own leaf first);
with no proven one left over, each other. With nobody proven, or under 3 measured pairs and no
floor, everybody is paired anew. Nobody meets the same partner twice. A bad pair of two nodes that
both passed elsewhere is an intermittent fault or a moment's trouble: both are tested again until
they have passed 3 times. Where a kind of pairs has no standard to be trusted, some pairs of
proven nodes are measured along.

So the number of rounds depends on the number of bad nodes that meet each other, not on that of
the nodes: 1 if all is well, 2 or 3 for one bad node, and never more than ``ROUNDS``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from health.active.judging.blame import (
    STANDARD,
    Pair,
    PairFacts,
    PairResult,
    PairVerdict,
    across,
    facts,
    verdict,
)

ROUNDS = 8
BLIND = 3
"""Rounds without a proven node after which no further round is run."""
AGAIN = 3
"""Passes of a node after which its bad pair with another good node is no longer retested."""

Reach = Callable[[str], Iterable[str]]


class _Pool:
    """Nodes that may still become a partner, by leaf, in the order given."""

    def __init__(self, nodes: Iterable[str], leaf_of: Mapping[str, str]) -> None:
        self._leaf_of = leaf_of
        self._by_leaf: dict[str, list[str]] = {}
        for node in nodes:
            self._by_leaf.setdefault(leaf_of.get(node, ""), []).append(node)

    def own(self, node: str) -> list[str]:
        leaf = self._leaf_of.get(node, "")
        return [leaf] if leaf in self._by_leaf else []

    def others(self, node: str) -> list[str]:
        leaf = self._leaf_of.get(node, "")
        return [name for name in self._by_leaf if name != leaf]

    def near(self, node: str) -> list[str]:
        return [*self.own(node), *self.others(node)]

    def far(self, node: str) -> list[str]:
        return [*self.others(node), *self.own(node)]

    def nodes(self) -> list[str]:
        return [node for nodes in self._by_leaf.values() for node in nodes]

    def drop(self, node: str) -> None:
        leaf = self._leaf_of.get(node, "")
        nodes = self._by_leaf.get(leaf, [])
        if node in nodes:
            nodes.remove(node)
            if not nodes:
                del self._by_leaf[leaf]

    def take(self, leaves: Iterable[str], not_these: Mapping[str, object]) -> str | None:
        for leaf in leaves:
            for node in self._by_leaf[leaf]:
                if node not in not_these:
                    self.drop(node)
                    return node
        return None


class Pairing:
    """A state machine: ``next_round``, run its pairs, ``record``, until there is no pair.

    ``floor_gbps`` (1e9 bytes/s): what a pair must reach; without it ``share`` of what is typical.
    A ``share`` of 0.5 does not see a link that runs at half its rate. The same ``seed`` and results
    give the same rounds.
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
        self._met: dict[str, dict[str, None]] = {node: {} for node in self._nodes}
        self._results: list[PairResult] = []
        self.rounds = 0

    def next_round(self) -> list[Pair]:
        """Pairs to run at once, each node in at most one; empty when it is over."""
        if self.rounds == ROUNDS:
            return []
        pairs = self._again() if self.rounds else self._first()
        self.rounds += bool(pairs)
        for pair in pairs:
            self._met[pair.one][pair.other] = None
            self._met[pair.other][pair.one] = None
        return pairs

    def record(self, results: Iterable[PairResult]) -> None:
        """Take the results of the round that runs: of each pair, also of one that failed."""
        self._results += results

    def verdict(self) -> PairVerdict:
        """The verdict so far."""
        return verdict(self._facts(), self._nodes, self._results, self._leaf_of)

    def _facts(self) -> PairFacts:
        return facts(self._results, self._leaf_of, self._floor, self._share)

    def _shuffled(self, nodes: Iterable[str]) -> list[str]:
        made = list(nodes)
        self._chance.shuffle(made)
        return made

    def _pool(self, nodes: Iterable[str]) -> _Pool:
        return _Pool(nodes, self._leaf_of)

    def _match(
        self, ones: Iterable[str], pool: _Pool, reach: Reach
    ) -> tuple[list[Pair], list[str]]:
        """Pairs of ``ones`` with partners from the pool, and those without a partner.

        ``ones`` may be in the pool.
        """
        pairs: list[Pair] = []
        left: list[str] = []
        busy: set[str] = set()
        for one in ones:
            if one in busy:
                continue
            pool.drop(one)
            other = pool.take(reach(one), self._met[one])
            if other is None:
                left.append(one)
            else:
                pairs.append(Pair(one, other))
                busy.add(other)
        return pairs, left

    def _among(self, nodes: list[str]) -> list[Pair]:
        """Pair these nodes with each other, inside a leaf switch as far as possible."""
        pool = self._pool(nodes)
        pairs, left = self._match(nodes, pool, pool.own)
        pool = self._pool(left)
        return pairs + self._match(left, pool, pool.near)[0]

    def _first(self) -> list[Pair]:
        nodes = self._shuffled(self._nodes)
        suspects = [node for node in nodes if node in self._suspects]
        pool = self._pool(node for node in nodes if node not in self._suspects)
        pairs, left = self._match(suspects, pool, pool.own)
        rest = left + pool.nodes()
        pool = self._pool(rest)
        more, left = self._match(rest, pool, pool.own)
        # One or none of a leaf is left: suspects with others again, before the rest.
        alone = [node for node in left if node in self._suspects]
        pool = self._pool(node for node in left if node not in self._suspects)
        cross, left = self._match(alone, pool, pool.near)
        return pairs + more + cross + self._among(left + pool.nodes())

    def _again(self) -> list[Pair]:
        known = self._facts()
        if not known.passed and self.rounds >= BLIND:
            return []
        named = known.named()
        left = [n for n in self._nodes if n not in named and not known.unstartable(n)]
        if not known.passed or (not known.standards and len(self._nodes) > 2):
            return self._among(self._shuffled(left))
        unexplained = {node: known.contradicted(node, named) for node in left}
        tried = {node: len(self._met[node]) for node in left}
        todo = [
            node
            for node in self._shuffled(left)
            if node not in known.passed
            or (unexplained[node] and len(known.passed[node]) < AGAIN)
        ]  # fmt: skip
        todo.sort(key=lambda node: (node in known.passed, tried[node]))
        waiting = set(todo)
        helpers = [n for n in self._shuffled(left) if n in known.passed and n not in waiting]
        helpers.sort(key=lambda node: (len(known.bad.get(node, ())), tried[node]))
        pool = self._pool(helpers)

        def reach(node: str) -> Iterable[str]:
            """A pair that was bad across leaves says more when repeated across."""
            doubts = unexplained[node]
            return (pool.far if doubts and self._far(node, doubts[0]) else pool.near)(node)

        pairs, alone = self._match(todo, pool, reach)
        pairs += self._among(alone)
        return pairs + self._controls(pairs, known, pool)

    def _far(self, one: str, other: str) -> bool:
        return across(self._leaf_of, one, other)

    def _controls(self, pairs: Sequence[Pair], known: PairFacts, pool: _Pool) -> list[Pair]:
        """Pairs of proven nodes, for the kinds of pairs without a standard to be trusted.

        A few: across leaves they share the uplinks with what is being tested.
        """
        trusted = {far for far, standard in known.standards.items() if standard.trusted}
        wanted = {self._far(*pair) for pair in pairs}.union(known.standards) - trusted
        made: list[Pair] = []
        for far in sorted(wanted):
            made += self._match(pool.nodes(), pool, pool.others if far else pool.own)[0]
        return made[: STANDARD + len(known.bad)]


__all__ = ["ROUNDS", "Pair", "PairResult", "PairVerdict", "Pairing"]
