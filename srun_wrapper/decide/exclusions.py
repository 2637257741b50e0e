"""Nodes that a job's next request excludes: the bad ones, as far as enough others remain.

A request that excludes more than its partition can spare stays pending for ever, so the oldest and
weakest evidence is dropped first (decision 24).
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from robust_slurm.slurm import SlurmNode
from robust_slurm.state_dir.ledger import WITHDRAWN


class Strength(enum.IntEnum):
    """Evidence against a node, the weakest first."""

    ONCE = 1  # it was lost, or suspected, once
    TWICE = 2
    PROVEN = 3  # tests of the machines, or a replay, have named it


class BadNode(NamedTuple):
    """A node that a job should not get again; ``time``: of the newest evidence, wall clock."""

    node: str
    strength: Strength = Strength.ONCE
    time: float = 0.0

    def again(self, strength: Strength, time: float) -> BadNode:
        """The node with one more piece of evidence."""
        return BadNode(self.node, max(self.strength, strength, Strength.TWICE), time)


def exclusions(
    bad: Iterable[BadNode], able: Collection[str], needed: int
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Choose the nodes to exclude so that ``needed`` of the ``able`` ones remain (pure).

    ``able``: nodes that could run the job. Excluding any other node costs nothing. Returns the
    excluded nodes, and those that are not excluded because too few others would be left.
    """
    bad = list(bad)
    room = len(able) - needed
    dropped = set[str]()
    for one in sorted(bad, key=lambda b: (b.strength, b.time), reverse=True):
        if one.node not in able:
            continue
        if room > 0:
            room -= 1
        else:
            dropped.add(one.node)
    names = dict.fromkeys(b.node for b in bad)
    return tuple(n for n in names if n not in dropped), tuple(n for n in names if n in dropped)


def able_nodes(
    nodes: Iterable[SlurmNode], partitions: Collection[str], features: str | None = None
) -> set[str]:
    """Names of the nodes that could run a job of these partitions, now or after others.

    ``features``: the job's constraint. A node that has none of its words cannot run the job; of a
    plain conjunction ("a&b") it must have all words.
    """
    words = set(re.findall(r"[\w.-]+", features or ""))
    plain = re.fullmatch(r"[\w.&,-]*", features or "") is not None

    def fits(node: SlurmNode) -> bool:
        if not node.usable or not set(partitions).intersection(node.partitions):
            return False
        has = set(node.features)
        return not words or (words <= has if plain else not words.isdisjoint(has))

    return {node.name for node in nodes if fits(node)}


def reports(job_dir: Path | None) -> list[Path]:
    """The reports against nodes in a job's directory that were not withdrawn."""
    try:
        found = sorted((job_dir / "accusations").glob("*.json")) if job_dir else []
    except OSError:
        return []
    wrong = {path.name.removesuffix(WITHDRAWN) for path in found if path.name.endswith(WITHDRAWN)}
    return [p for p in found if p.name.removesuffix(WITHDRAWN).removesuffix(".json") not in wrong]


def reported_node(report: Path) -> str:
    return report.name.rsplit(".", 2)[0]  # NODE.INCIDENT.json


def remembered(job_dir: Path | None) -> list[BadNode]:
    """Nodes named in the job's reports, those of its earlier runs and steps included."""
    found: dict[str, BadNode] = {}
    for path in reports(job_dir):
        strength, time, node = Strength.ONCE, 0.0, reported_node(path)
        try:
            record = json.loads(path.read_text(errors="replace"))
            time = float(record["time"])
            strength = Strength.PROVEN if record.get("proven") else Strength.ONCE
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            pass  # the file's name still names the node
        before = found.get(node)
        found[node] = before.again(strength, time) if before else BadNode(node, strength, time)
    return list(found.values())


def names(bad: Sequence[BadNode]) -> list[str]:
    return [one.node for one in bad]
