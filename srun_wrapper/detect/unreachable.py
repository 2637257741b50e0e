"""An unreachable node, judged by what several others see: who is asked, and what follows (pure).

Silence alone has a long limit (``node_watch``). A node is lost sooner only where all agree: neither
robust-srun nor other nodes that could reach it before get an answer from its kernel, while they
and its neighbours give signs of life.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

T = TypeVar("T", bound=Hashable)
Verdict = Literal["wait", "lost", "reached"]

WITNESSES = 3  # nodes that are asked to reach a suspect
AGREE = 2  # of them that must have failed, where the job has so many
TRIED = 4  # attempts of a witness that count; with fewer it was held up itself
NEIGHBOURS = 16  # nodes that must give a sign of life: those that may share a switch or a chassis
REMEMBERED = 3600.0  # s for which the longest silence that ended counts
FACTOR = 2.0  # a silence may be so many times as long as the longest that ended


@dataclass(frozen=True, slots=True)
class OverdueNode:
    """A node whose sign of life is late, and the evidence. Times are monotonic seconds."""

    end: float  # it may be lost from then on
    able: int  # nodes that could be witnesses if there were no firewall and all were well
    failed: Sequence[int] = ()  # attempts of each witness that got no answer to any of them
    reached: bool = False  # a witness got an answer
    unheard: int = 0  # neighbours and witnesses without a sign of life since it was first asked
    silent: int = 0  # other nodes of the job that do not answer either


def judge(seen: OverdueNode, now: float) -> Verdict:
    """Return what is known of the node.

    ``reached``: its host lives, and what is broken is a way to it.
    """
    if seen.reached:
        return "reached"
    if now < seen.end or seen.unheard or seen.silent:
        return "wait"
    failed = sum(tried >= TRIED for tried in seen.failed)
    return "lost" if 0 < min(seen.able, AGREE) <= failed else "wait"


class SilencePatience:
    """Sets the limit: longer, where silences of this job have ended by themselves."""

    def __init__(self, limit: float) -> None:
        """``limit``: the setting; 0: off."""
        self.off = limit <= 0
        self._limit = limit
        # End and length of past silences; each is longer than all that ended after it.
        self._ended: list[tuple[float, float]] = []

    def note(self, length: float, now: float) -> None:
        """A node that nobody could reach has answered after ``length`` seconds of silence."""
        self._ended = [(at, long) for at, long in self._ended if long > length]
        self._ended.append((now, length))

    def limit(self, now: float) -> float:
        """Return the seconds after which a silent node may be lost; 0: never so."""
        self._ended = [(at, long) for at, long in self._ended if now - at < REMEMBERED]
        longest = self._ended[0][1] if self._ended else 0.0
        return max(self._limit, FACTOR * longest) if not self.off else 0.0


def choose(nodes: Sequence[T], suspect: T, count: int = WITNESSES) -> list[T]:
    """Return the nodes that are asked to reach one of ``nodes``, which are in the job's order.

    They are far from it and from one another, so most likely on other switches.
    """
    others = _after(nodes, suspect)
    if len(others) <= count:
        return others
    return [others[(2 * part + 1) * len(others) // (2 * count)] for part in range(count)]


def neighbours(nodes: Sequence[T], suspect: T, count: int = NEIGHBOURS) -> list[T]:
    """Return the nodes nearest to one of ``nodes``, by the job's order."""
    others = _after(nodes, suspect)
    if len(others) <= count:
        return others
    return others[: count // 2] + others[len(others) - (count - count // 2) :]


def _after(nodes: Sequence[T], node: T) -> list[T]:
    """Return all others, those after it first."""
    place = nodes.index(node)
    return [*nodes[place + 1 :], *nodes[:place]]
