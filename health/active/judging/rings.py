"""All-reduce rings among nodes whose pairs are tested, and the conclusions from them. Pure.

A pair loads two ports; a switch that drops or delays under load, and a sum that is wrong only among
many, show when neighbours all send at once. First the nodes of each leaf switch, all switches at
the same time; then one ring through all switches whose own ring was good. A ring names no node: it
says which of its nodes cannot be cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from health.active.judging.kinds import SHARE_GPU
from health.active.judging.speed import SHARED
from health.active_tests import Measured
from robust_slurm.slurm.values import fold

LEAST = 3
"""Nodes of a ring: two are a pair."""
MOST = 128
"""Most nodes of a ring: a larger group takes longer to form than to test."""

Ring = tuple[str, ...]


class RingRemark(NamedTuple):
    """``wrong``: its nodes cannot be cleared; else it was only slow."""

    nodes: Ring
    wrong: bool
    text: str


def of_leaves(nodes: Sequence[str], leaf_of: Mapping[str, str]) -> list[Ring]:
    """Make a ring of each leaf switch, or several of at most MOST; none if there is one switch."""
    leaves = _leaves(nodes, leaf_of)
    if len(leaves) < 2:
        return []
    parts = (_parts(of_leaf) for of_leaf in leaves)
    return [ring for of_leaf in parts for ring in of_leaf if len(ring) >= LEAST]


def through_all(nodes: Sequence[str], leaf_of: Mapping[str, str]) -> list[Ring]:
    """Make one ring, leaf by leaf, so that most neighbours share a switch; beyond MOST nodes, an
    equal number of each."""
    leaves = _leaves(nodes, leaf_of)
    in_turn = [node for turn in zip_longest(*leaves) for node in turn if node is not None]
    chosen = set(in_turn[:MOST])
    ring = tuple(node for of_leaf in leaves for node in of_leaf if node in chosen)
    return [ring] if len(ring) >= LEAST else []


def remarks(
    measured: Iterable[Measured], usual_gbps: float | None, *, paired: bool = True
) -> list[RingRemark]:
    """Remarks on rings that ended. ``usual_gbps``: of the pairs, if their nodes are of one kind.

    ``paired``: there were pairs. The bandwidth of the bus does not depend on how many there are
    (nccl-tests, PERFORMANCE.md), if messages are large enough; of cores that others use as well it
    says nothing.
    """
    rings: dict[Ring, list[Measured]] = {}
    for one in measured:
        if one.test == "ring":
            rings.setdefault(one.peers, []).append(one)
    found = []
    for nodes, sides in rings.items():
        wrong = [f"{one.node}: {line}" for one in sides for line in one.wrong]
        speeds = [one.values["busbw_gbps"] for one in sides if "busbw_gbps" in one.values]
        whole = len(speeds) == len(nodes) and not SHARED.issuperset(one.model for one in sides)
        what = f"all-reduce among {fold(nodes)}"
        if wrong:
            next_ = (
                "their pairs gave right results: test the switches"
                if paired
                else "test them in pairs"
            )
            text = f"{what} gave a wrong result ({wrong[0]}); {next_}"
            found.append(RingRemark(nodes, True, text))
        elif whole and usual_gbps is not None and min(speeds) < SHARE_GPU * usual_gbps:
            text = f"{what}: {min(speeds):.3g} GB/s, pairs {usual_gbps:.3g}: test the switches"
            found.append(RingRemark(nodes, False, text))
    return found


def _leaves(nodes: Sequence[str], leaf_of: Mapping[str, str]) -> list[list[str]]:
    """The nodes by leaf switch; those of unknown ones together."""
    found: dict[str, list[str]] = {}
    for node in nodes:
        found.setdefault(leaf_of.get(node, ""), []).append(node)
    return list(found.values())


def _parts(nodes: Sequence[str]) -> list[Ring]:
    """Return as few rings as possible, whose sizes differ by one node at most."""
    count = -(-len(nodes) // MOST)
    return [tuple(nodes[part::count]) for part in range(count)]
