"""Evidence about a slow rank's node: hardware and load that differ from other nodes' (pure).

A fact that many nodes show is left out: these machines are so, or the nodes share its cause.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from robust_slurm.error_counters import costs_time, weight
from srun_wrapper.locate.slow import Slow
from srun_wrapper.protocol.looking_messages import STOLEN, SWAPPED, THROTTLED, Machine

MOST_NODES = 256  # that are compared with each other
HINTS = 5  # lines
ALIKE = 4  # a fact of more than a quarter of the other nodes singles nothing out
TIMES = 10  # a count grows so many times as fast as on the other nodes
LOST = 20.0  # % of the time that processes wait for the CPU or memory ...
MORE = 2.0  # ... and so many times as much as on the other nodes
ERRORS = 10  # of a counter: single corrected errors come and go, and slow nothing down
GRAVEST = 1  # weights up to this one count from the first error: lost data, lost links
LEAST = {THROTTLED: 10, SWAPPED: 1000, STOLEN: 100}  # growth of a count that is a fact


@dataclass(frozen=True, slots=True)
class Facts:
    """Lines about one node."""

    hardware: tuple[str, ...] = ()  # hot, throttled, a degraded link, errors of a link
    load: tuple[str, ...] = ()  # other causes of slowness: others' work, memory, the hypervisor

    @property
    def lines(self) -> tuple[str, ...]:
        return (*self.hardware, *self.load)


@dataclass(frozen=True, slots=True)
class Seen:
    """The readings of a node at the beginning and at the end of the looks."""

    before: Machine
    after: Machine
    errors: Mapping[str, int]  # error counters that have grown between, by how much


def facts_of(node: str, seen: Mapping[str, Seen]) -> Facts:
    """Return the facts that single a node out; none where there is no other node to compare."""
    mine = seen.get(node)
    others = [each for name, each in seen.items() if name != node]
    if mine is None or not others:
        return Facts()
    found = _hardware(mine, others), _load(mine, others)
    hardware, load = (tuple(f"{node}: {line}" for line in lines) for lines in found)
    return Facts(hardware, load)


def of_any(seen: Mapping[str, Seen]) -> Facts:
    """Return the hardware facts of all nodes, for a job in which no node stands out: hints only."""
    if len(seen) > MOST_NODES:
        return Facts()
    found = [line for node in seen for line in facts_of(node, seen).hardware]
    return Facts(tuple(found[:HINTS]))


def corroborated(found: Slow, facts: Facts) -> bool:
    """True if the machine that is slow has a fault that explains it, and nothing else does."""
    innocent = found.loads or found.saves or found.storage or facts.load
    return found.kind == "ranks" and bool(found.node and facts.hardware and not innocent)


def _hardware(mine: Seen, others: list[Seen]) -> list[str]:
    lines = []
    if _few(bool(each.after.hot) for each in others):
        lines += [f"hot: {text}" for text in mine.after.hot]
    for text in mine.after.below:
        if _few(text in each.after.below for each in others):
            lines.append(f"degraded link: {text}")
    for link, rate in mine.after.links.items():
        if rate >= mine.after.first_links.get(link, math.inf):
            continue  # it was no faster before the job became slow
        rates = [each.after.links[link] for each in others if link in each.after.links]
        usual = statistics.median_high([rate, *rates])
        if rate < usual and _few(other <= rate for other in rates):
            lines.append(f"degraded link: {link} {rate:g} Gb/s, on the others {usual:g}")
    for name, grown in mine.errors.items():
        least = 1 if weight(name) <= GRAVEST else ERRORS
        rest = [each.errors.get(name, 0) for each in others]
        if costs_time(name) and grown >= least and _stands_out(grown, rest):
            lines.append(f"errors: {name} +{grown}")
    if grown := _count(THROTTLED, mine, others):
        lines.append(f"throttled: {THROTTLED} +{grown}")
    return lines


def _load(mine: Seen, others: list[Seen]) -> list[str]:
    lines = []
    for name in (SWAPPED, STOLEN):
        if grown := _count(name, mine, others):
            lines.append(f"{name} +{grown}")
    for what, share in mine.after.load.items():
        usual = statistics.median(each.after.load.get(what, 0.0) for each in others)
        if share >= LOST and share >= MORE * usual:
            lines.append(
                f"processes wait for {what} {share:.0f} % of the time, on the others {usual:.0f} %"
            )
    return lines


def _few(alike: Iterable[bool]) -> bool:
    """True if at most a quarter of the other nodes are like this one."""
    marks = list(alike)
    return ALIKE * sum(marks) <= len(marks)


def _count(name: str, mine: Seen, others: list[Seen]) -> int:
    """Return the growth of a count if the node stands out by it; else 0."""
    own = _growth(name, mine)
    rest = [_growth(name, each) for each in others]
    return own if own >= LEAST[name] and _stands_out(own, rest) else 0


def _growth(name: str, each: Seen) -> int:
    before = each.before.counts.get(name)
    return 0 if before is None else max(0, each.after.counts.get(name, before) - before)


def _stands_out(own: int, others: list[int]) -> bool:
    few = _few(each * 2 >= own for each in others)
    return own > 0 and few and own >= TIMES * statistics.median(others)
