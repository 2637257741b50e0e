"""Locate the ranks for which the others wait, and the machines that are suspect. Pure.

After ByteRobust (arXiv 2509.16293, section 5.1): stacks are grouped by string; the dominant group
is healthy, the rest are outliers, and the smallest parallel group that they share is suspect. Added
here: the calls in which a rank waits for other ranks are known, so only outliers in no such call
count; and an outlier that many nodes show has a shared cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from srun_wrapper.decide.shared_cause import common
from srun_wrapper.locate.ranks import (
    RankView,
    StackGroup,
    behind,
    dominant,
    grouped,
    nodes_of,
    numbered,
    shared_group,
)

FEW_NODES = 2
GROUP_SHARE = 4  # a parallel group on more than a quarter of the nodes singles nothing out


@dataclass(frozen=True, slots=True)
class Located:
    """The ranks and nodes that were located; ``nodes`` is () if nothing singles a machine out.

    The event ``located`` has these fields.
    """

    ranks: tuple[int, ...] = ()  # those for which the others wait, or that stand out
    nodes: tuple[str, ...] = ()  # suspects
    why: str = ""
    group: tuple[int, ...] = ()  # the parallel group that they share

    @property
    def clear(self) -> bool:
        return bool(self.nodes)


@dataclass(frozen=True, slots=True)
class _Odd:
    views: tuple[RankView, ...]
    why: str
    waiting: bool  # all of them wait for other ranks themselves


def locate(views: Sequence[RankView], mesh: Mapping[str, int]) -> Located:
    """Locate what the job waits for. ``views``: all ranks that are expected to make steps.

    ``mesh``: the parallel dimensions as the job has named them, in DeviceMesh order; {}: unknown.
    """
    groups = grouped(views)
    odd = _stopped(views) or _outside(views, groups) or _late(views) or _unlike(groups)
    if odd is None:
        return Located(why="no rank stands out")
    ranks = tuple(sorted(view.rank for view in odd.views))
    nodes, everywhere = nodes_of(odd.views), nodes_of(views)
    if len(nodes) == 1:
        return Located(ranks, nodes, odd.why)
    group = shared_group(ranks, mesh, len(views))
    inside = set(group)
    members = nodes_of(view for view in views if view.rank in inside)
    few = max(FEW_NODES, len(everywhere) // GROUP_SHARE)
    if group and len(members) <= few and len(members) < len(everywhere):
        suspects = members if odd.waiting else nodes
        return Located(ranks, suspects, f"{odd.why}; they share a parallel group", group)
    if common(len(nodes), len(everywhere)):
        shared = f"{len(nodes)} of {len(everywhere)} nodes: one cause that they share"
        return Located(ranks, (), f"{odd.why}, on {shared}")
    return Located(ranks, nodes, odd.why)


def _stopped(views: Sequence[RankView]) -> _Odd | None:
    found = tuple(view for view in views if view.state == "T")
    return _Odd(found, f"{_named(found)} stopped (state T)", waiting=False) if found else None


def _outside(views: Sequence[RankView], groups: Sequence[StackGroup]) -> _Odd | None:
    """Ranks in no call that waits for others, while at least half of all are in one.

    A process that waits for a device or a file (state D) may not show a stack.
    """
    waiting = [view for group in groups if group.waits for view in group.ranks]
    found = tuple(view for group in groups if not group.waits for view in group.ranks)
    found += tuple(view for view in views if not view.stack and view.state == "D")
    if not found or len(waiting) < len(found):
        return None
    others = "the other waits" if len(waiting) == 1 else f"the other {len(waiting)} wait"
    return _Odd(found, f"{_named(found)} in no collective: {others} for it", waiting=False)


def _late(views: Sequence[RankView]) -> _Odd | None:
    found = behind(views)
    return _Odd(found, f"{_named(found)} steps behind the others", waiting=True) if found else None


def _unlike(groups: Sequence[StackGroup]) -> _Odd | None:
    """Ranks in other calls than the dominant group.

    If the dominant group does not wait, ranks that wait do so for it: they are no outliers.
    """
    healthy = dominant(groups)
    if healthy is None:
        return None
    rest = [group for group in groups if group is not healthy]
    if not healthy.waits:
        rest = [group for group in rest if not group.waits]
    found = tuple(view for group in rest for view in group.ranks)
    if not found:
        return None
    waiting = all(group.waits for group in rest)
    return _Odd(found, f"{_named(found)} in other calls than the others", waiting)


def _named(views: Sequence[RankView]) -> str:
    verb = "is" if len(views) == 1 else "are"
    return f"{numbered([view.rank for view in views])} {verb}"
