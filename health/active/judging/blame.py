"""The proof that the results of pairs give about each node. Pure; standard library only.

A pair is *bad* when its data came out wrong, at whatever speed, or when it was slow. Slow is below
the floor where one is given; otherwise below a share of what the nodes typically reach with their
best partner so far. The best partner, because a healthy node is as slow as its partner: of 16 nodes
5 bad ones can slow 5 of 8 pairs, but never most of the nodes' best. Where a tenth of the nodes or
more is far above what is typical, the slow ones are the majority for now: then the standard is not
``trusted``, slow pairs are measured again, and nobody is named for speed. Pairs inside a leaf
switch and across have standards of their own; that of the kind with fewer pairs is taken only from
nodes that are good in the other, since it is mostly suspects that are measured there. Under 3 pairs
there is no standard. Then the other kind's can let a pair pass but not fail it, and with none at
all only wrong data counts.

A node that was in a pair that passed is *proven* good. It takes two bad pairs with two different
proven partners to name a node; if they were slow, two more than passed. One would do if a
measurement could not err; a moment's congestion is not repeated with another partner. (With a
chance e of a false "slow", a healthy node is named with about e²: (3e-7)² at half the median and
10 % noise, but 2e-6 at 0.7 of it.) The node in most such pairs is named first, and those pairs no
longer count against its partners: a proven node that was lent to two bad ones is not named for it.
A healthy node can still be named if it meets two intermittently bad ones in a row, each of which
passes with others; ``python -m bench.pairing`` says how often.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import NamedTuple

ENOUGH = 2
"""Bad pairs with different proven partners that name a node; failed starts that make an error."""
STANDARD = 3
"""Measured pairs under which a median says nothing."""
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


class PairVerdict(NamedTuple):
    """``named``: bad nodes with a line for each bad pair. ``cleared``: in a pair that passed, and
    nothing speaks against them. ``undecided``: why, by node. ``errors``: could not be tested, by
    node. Every node is in exactly one. ``median_gbps``: of all pairs with right data."""

    named: dict[str, tuple[str, ...]]
    cleared: frozenset[str]
    undecided: dict[str, str]
    errors: dict[str, str]
    median_gbps: float | None


class Standard(NamedTuple):
    limit: float
    trusted: bool


class Bad(NamedTuple):
    """``solid``: by wrong data, or by a standard to be trusted."""

    why: str
    wrong: bool
    solid: bool
    across: bool


@dataclass(slots=True)
class PairFacts:
    """Facts by node, then by partner. ``standards``: by whether the pair is across leaves, as are
    the values of ``passed``."""

    standards: dict[bool, Standard]
    passed: dict[str, dict[str, bool]] = field(default_factory=dict)
    bad: dict[str, dict[str, Bad]] = field(default_factory=dict)
    errors: dict[str, dict[str, str]] = field(default_factory=dict)

    def named(self, *, solid: bool = False) -> dict[str, list[str]]:
        """The nodes to blame, with their proven partners. ``solid``: only by a trusted standard."""
        left = {
            node: [p for p, b in partners.items() if p in self.passed and (b.solid or not solid)]
            for node, partners in self.bad.items()
        }
        found: dict[str, list[str]] = {}
        while guilty := [node for node in left if self._enough(node, left[node])]:
            most = max(guilty, key=lambda n: (len(left[n]), -len(self.passed.get(n, ())), n))
            found[most] = left.pop(most)
            for partner in found[most]:
                if most in left.get(partner, ()):
                    left[partner].remove(most)
        return found

    def _enough(self, node: str, partners: Sequence[str]) -> bool:
        """Wrong data is no noise; what was slow must outweigh what was not."""
        wrong = sum(self.bad[node][partner].wrong for partner in partners)
        return max(wrong, len(partners) - len(self.passed.get(node, ()))) >= ENOUGH

    def unstartable(self, node: str) -> bool:
        """True if the node could not start with two partners, one of which passed elsewhere."""
        failed = self.errors.get(node, {})
        return (
            node not in self.passed
            and len(failed) >= ENOUGH
            and any(partner in self.passed for partner in failed)
        )

    def contradicted(self, node: str, named: Iterable[str]) -> list[str]:
        """Partners with which it was bad although both are proven, and neither is named."""
        if node not in self.passed:
            return []
        return [p for p in self.bad.get(node, ()) if p in self.passed and p not in named]


def across(leaf_of: Mapping[str, str], one: str, other: str) -> bool:
    """True if they hang on different leaf switches. Nodes of unknown leaf count as one leaf."""
    return leaf_of.get(one, "") != leaf_of.get(other, "")


def facts(
    results: Sequence[PairResult], leaf_of: Mapping[str, str], floor: float | None, share: float
) -> PairFacts:
    """Sort the results into passed, bad and error."""
    found = PairFacts(_standards(results, leaf_of, floor, share))
    for result in results:
        far = across(leaf_of, result.one, result.other)
        own = found.standards.get(far)
        # Without an own limit the other kind's can let a pair pass, but not fail.
        limit = own or found.standards.get(not far)
        speed = result.gbps if _measured(result) else None
        for node, partner in ((result.one, result.other), (result.other, result.one)):
            if result.wrong:
                why = f"with {partner}: {result.evidence or 'the data came out wrong'}"
                found.bad.setdefault(node, {})[partner] = Bad(why, True, True, far)
            elif speed is None:
                why = f"with {partner}: {result.error or 'no bandwidth was measured'}"
                found.errors.setdefault(node, {})[partner] = why
            elif limit is None or speed >= limit.limit:
                found.passed.setdefault(node, {})[partner] = far
            elif own is not None:
                why = f"with {partner}: {speed:.3g} GB/s, at least {own.limit:.3g} expected"
                found.bad.setdefault(node, {})[partner] = Bad(why, False, own.trusted, far)
    return found


def _measured(result: PairResult) -> bool:
    speed = result.gbps
    return not result.wrong and not result.error and speed is not None and math.isfinite(speed)


def _standards(
    results: Iterable[PairResult], leaf_of: Mapping[str, str], floor: float | None, share: float
) -> dict[bool, Standard]:
    if floor is not None:
        return {False: Standard(floor, True), True: Standard(floor, True)}
    pairs: dict[bool, list[PairResult]] = {False: [], True: []}
    for result in results:
        if _measured(result):
            pairs[across(leaf_of, result.one, result.other)].append(result)
    most = max(pairs, key=lambda far: len(pairs[far]))
    if len(pairs[most]) < STANDARD:
        return {}
    best = _best(pairs[most])
    found = {most: _standard(list(best.values()), share)}
    # The other kind is measured with suspects above all: only those good in this one count.
    good = {node for node, speed in best.items() if speed >= found[most].limit}
    fair = [result for result in pairs[not most] if {result.one, result.other} <= good]
    if len(fair) >= STANDARD:
        found[not most] = _standard(list(_best(fair).values()), share)
    return found


def _best(results: Iterable[PairResult]) -> dict[str, float]:
    best: dict[str, float] = {}
    for result in results:
        for node in (result.one, result.other):
            best[node] = max(best.get(node, 0.0), result.gbps or 0.0)
    return best


def _standard(best: list[float], share: float) -> Standard:
    typical = median_low(best)  # low: half of the nodes are not most of them
    top = sorted(best, reverse=True)[len(best) // 10]
    trusted = typical >= share * top
    return Standard(share * (typical if trusted else top), trusted)


def verdict(
    known: PairFacts,
    nodes: Sequence[str],
    results: Iterable[PairResult],
    leaf_of: Mapping[str, str],
) -> PairVerdict:
    """The verdict on all nodes so far. A node without any result yet is undecided."""
    suspected, solid = known.named(), known.named(solid=True)
    leaves = _bad_leaves(known, solid, nodes, leaf_of)
    named: dict[str, tuple[str, ...]] = {}
    undecided: dict[str, str] = {}
    errors: dict[str, str] = {}
    cleared = set()
    for node in nodes:
        passed, bad = known.passed.get(node, {}), known.bad.get(node, {})
        if node in solid:
            lines = tuple(bad[partner].why for partner in solid[node])
            leaf = leaf_of.get(node, "")
            if leaf in leaves:
                undecided[node] = (
                    f"most nodes of leaf switch {leaf} are bad in pairs ({lines[0]}): test the "
                    "switch and its uplinks before blaming the nodes"
                )
            elif not all(passed.values()) and all(bad[p].across for p in solid[node]):
                undecided[node] = (
                    f"good inside its leaf switch {leaf}, bad across ({'; '.join(lines)}): test "
                    "the switch's uplinks"
                )
            else:
                named[node] = lines
        elif node in suspected:
            undecided[node] = (
                f"slow ({_lines(bad)}), but so are most nodes, so the right speed is unknown: set "
                f"a minimum bandwidth, or test the network"
            )
        elif _in_doubt(doubts := [bad[p] for p in known.contradicted(node, suspected)]):
            undecided[node] = (
                f"{'; '.join(entry.why for entry in doubts)}; but all of them are good with "
                f"others: one of them fails intermittently; test them longer"
            )
        elif passed:
            cleared.add(node)
        elif node in known.errors:
            errors[node] = "; ".join(known.errors[node].values())
        elif bad:
            undecided[node] = (
                f"bad ({_lines(bad)}), but that may be the partner's fault: test it with nodes "
                "that are known to be good"
            )
        else:
            undecided[node] = (
                "not judged: no partner or no time was left; test it with another node"
            )
    slow = [node for node in named if not any(known.bad[node][p].wrong for p in solid[node])]
    if len(slow) > max(1, int(FEW * len(nodes))):
        for node in slow:
            undecided[node] = (
                f"slow ({'; '.join(named.pop(node))}), but so are {len(slow)} of {len(nodes)} "
                "nodes: two kinds of machine, or two networks?"
            )
    speeds = [result.gbps for result in results if _measured(result) and result.gbps is not None]
    middle = median(speeds) if speeds else None
    return PairVerdict(named, frozenset(cleared), undecided, errors, middle)


def _in_doubt(bad: Sequence[Bad]) -> bool:
    """One slow moment is forgiven."""
    return len(bad) >= ENOUGH or any(entry.wrong for entry in bad)


def _lines(bad: Mapping[str, Bad]) -> str:
    return "; ".join(entry.why for entry in bad.values())


def _bad_leaves(
    known: PairFacts, named: Iterable[str], nodes: Sequence[str], leaf_of: Mapping[str, str]
) -> frozenset[str]:
    """Return the leaves of which most nodes would be named and none passed with a node of another
    leaf; there is another leaf to compare with."""
    size = Counter(leaf_of.get(node, "") for node in nodes)
    bad = Counter(leaf_of.get(node, "") for node in named)
    reached = {leaf_of.get(n, "") for n, partners in known.passed.items() if any(partners.values())}
    if len(size) < 2:
        return frozenset()
    return frozenset(
        leaf
        for leaf, n in bad.items()
        if leaf and leaf not in reached and n >= LEAF and 2 * n > size[leaf]
    )
