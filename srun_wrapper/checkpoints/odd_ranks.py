"""The one rank that differs from all ranks that share its state: its machine or the program. Pure.

A bit that flips in a parameter stays on its rank: the gradients are averaged, so all ranks change
alike from then on. Ranks of which several differ, or whose difference goes away, differ by the
program (local SGD). Why so: docs/decisions/0055-odd-ranks.md.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from robust_slurm.checkpoint.planning.alike import Outcome

COMMIT = 60.0  # s for a step that all ranks have written to be committed
SETTLE = 10.0  # s for all ranks of a group to report a step at which some differ
CONFIRM = 900.0  # s for a second step; a slow write to disk may come in between
RECENT = 86400.0  # s; odd ranks on RARE other nodes within this time point to the program
RARE = 2  # nodes


@dataclass(slots=True)
class Agreement:
    """A group's comparisons in the running epoch."""

    alike: int | None = None
    """The first step at which all ranks held the same."""
    whole: int | None = None
    """The newest step at which they did in every byte."""
    since: float = 0.0
    """Time at which some were first seen to differ; 0.0: none was."""
    why: str = ""
    first: Outcome | None = None
    """The first step at which one rank alone differed."""
    confirmed: Outcome | None = None
    """A later step at which the same rank did. One of the two was compared in every byte: sums of
    a portion also differ where tensors lie in memory in another way."""
    behind: int = 0
    """The step to go back to: newest known to be from before; 0: none is on disk yet."""
    written: float = 0.0
    """Time at which a step from before was last seen on its way to disk; 0.0: none was."""

    def take(self, found: Outcome, now: float) -> bool:
        """Take an outcome; True if it shows that the ranks do not share a state any more."""
        first = self.first
        if not found.differ:
            if first is not None and found.step > first.step and found.whole:
                return True  # it went away: no bit that flipped
            self.alike = found.step if self.alike is None else self.alike
            if found.whole:
                self.whole = max(found.step, self.whole or 0)
            return False
        self.since, self.why = self.since or now, self.why or found.differ
        if found.open:
            return False
        if found.odd is None or self.alike is None:
            return True
        if max(self.alike, self.whole or 0) >= found.step:
            return True
        if first is None:
            self.first = found
        elif found.odd != first.odd:
            return True
        elif found.step > first.step and (found.whole or first.whole):
            self.confirmed = self.confirmed or found
        return False

    def expired(self, now: float) -> bool:
        """True if what was waited for has not come."""
        if not self.since or self.confirmed is not None:
            return False
        return now - self.since > (SETTLE if self.first is None else CONFIRM)


@dataclass(slots=True)
class OddRank:
    """A rank that was found to differ, earlier in this job."""

    rank: int
    node: str
    step: int
    evicted: bool
    passed: bool = False
    """True if its group has come further, and all its ranks held the same then."""
    at: float = 0.0


class OddRankVerdict(NamedTuple):
    """The judgement of an odd rank, with the nodes that it acquits."""

    verdict: Literal["first", "node", "program", "unclear"]
    why: str = ""
    acquitted: tuple[str, ...] = ()
    """Nodes that were evicted although they were not at fault."""


def judge(
    before: Sequence[OddRank],
    rank: int,
    node: str,
    held: Collection[int],
    peers: Collection[str],
    now: float,
) -> OddRankVerdict:
    """Judge by the odd ranks before. ``held``: all ranks of the node; ``peers``: the other ranks'
    nodes."""
    if len(set(peers)) == 1 and node not in peers:
        return OddRankVerdict(
            "unclear", f"all others are on {next(iter(peers))}: either may be wrong"
        )
    if came := [each for each in before if each.rank == rank and each.node != node]:
        why = f"rank {rank} was it on {came[-1].node} before, too: the program or the rank's data"
        return OddRankVerdict("program", why, _evicted(came))
    recent = [each for each in before if each.node != node and now - each.at < RECENT]
    if len({each.node for each in recent}) >= RARE:
        names = ", ".join(dict.fromkeys(each.node for each in recent))
        why = f"ranks on {names} were it within {RECENT / 3600:g} h: so many machines are not bad"
        return OddRankVerdict("program", why, _evicted(recent))
    here = [each for each in before if each.node == node]
    if moved := [each for each in here if each.rank not in held]:
        why = f"rank {moved[-1].rank} was it on {node} before, and has moved to another node since"
        return OddRankVerdict("node", why)
    if here:
        why = f"the second time on {node}, whose ranks could not be moved: it or the program"
        return OddRankVerdict("unclear", why)
    if elsewhere := [each for each in before if not each.passed]:
        why = f"rank {elsewhere[-1].rank} on {elsewhere[-1].node} was it at this spot before"
        return OddRankVerdict("program", why, _evicted(elsewhere))
    return OddRankVerdict("first")


def _evicted(those: Sequence[OddRank]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each.node for each in those if each.evicted))
