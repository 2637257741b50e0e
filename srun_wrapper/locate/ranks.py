"""Facts about each rank while the job makes no step, and groups of ranks. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod

from srun_wrapper.locate.stacks import Key, Stack, key, waits
from standby.placement.spread import fits


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank; ``stack`` is () where it is not known."""

    rank: int
    node: str
    stack: Stack = ()
    state: str = "S"  # as in /proc/PID/stat; T: stopped
    step: int | None = None  # its last
    loaders: tuple[tuple[int, Stack], ...] = ()  # pid and stack of its data-loader workers
    failed: str = ""  # why its stack is not known
    mount: str = ""  # the file system for which it waits; "" if it waits for none
    kernel: str = ""  # the file for which it or its loader waits in state D; its killed children


@dataclass(frozen=True, slots=True)
class StackGroup:
    """Ranks in the same calls."""

    key: Key
    ranks: tuple[RankView, ...]
    waits: str  # the call in which they wait for other ranks; "" if they are in none


def grouped(views: Iterable[RankView]) -> list[StackGroup]:
    """Return the ranks whose stacks are known in groups by stack, the largest group first."""
    groups: dict[Key, list[RankView]] = {}
    for view in views:
        if view.stack:
            groups.setdefault(key(view.stack), []).append(view)
    found = [StackGroup(k, tuple(ranks), waits(k)) for k, ranks in groups.items()]
    return sorted(found, key=lambda group: (-len(group.ranks), group.ranks[0].rank))


def dominant(groups: Sequence[StackGroup]) -> StackGroup | None:
    """Return the group that the healthy ranks make: two ranks at least, half of all, and twice as
    many as any other group. None if no group is that large."""
    if not groups:
        return None
    size, total = len(groups[0].ranks), sum(len(group.ranks) for group in groups)
    second = len(groups[1].ranks) if len(groups) > 1 else 0
    return groups[0] if size >= 2 and 2 * size >= total and size >= 2 * second else None


def behind(views: Sequence[RankView]) -> tuple[RankView, ...]:
    """Return the ranks whose last step is before that of a clear majority (two thirds)."""
    known = [view for view in views if view.step is not None]
    if len(known) < 3:
        return ()
    ((most, count),) = Counter(view.step or 0 for view in known).most_common(1)
    if 3 * count < 2 * len(known):
        return ()
    return tuple(view for view in known if (view.step or 0) < most)


def shared_group(ranks: Sequence[int], mesh: Mapping[str, int], world: int) -> tuple[int, ...]:
    """Return the smallest parallel group that all these ranks are in; () if there is none.

    Its ranks agree with each other in all dimensions in which the given ranks agree. A group that
    is the whole world is none. ``mesh``: sizes in DeviceMesh order, the last varies fastest.
    """
    if not fits(mesh, world) or not ranks or max(ranks) >= world:
        return ()
    sizes = list(mesh.values())
    places = [_place(rank, sizes) for rank in ranks]
    same = [dim for dim in range(len(sizes)) if len({place[dim] for place in places}) == 1]
    fixed = [dim for dim in same if sizes[dim] > 1]
    if not fixed:
        return ()
    free = [dim for dim in range(len(sizes)) if dim not in fixed]
    first = sum(places[0][dim] * prod(sizes[dim + 1 :]) for dim in fixed)
    steps = [[n * prod(sizes[dim + 1 :]) for n in range(sizes[dim])] for dim in free]
    return tuple(sorted(first + sum(each) for each in product(*steps)))


def _place(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    place = []
    for size in reversed(sizes):
        rank, coordinate = divmod(rank, size)
        place.append(coordinate)
    return tuple(reversed(place))


def nodes_of(views: Iterable[RankView]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(view.node for view in views))


def rank_list(ranks: Iterable[int]) -> str:
    """ "0-11,14": at most eight ranges, then their number."""
    ordered = sorted(set(ranks))
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ordered), _offset)]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and others ({len(ordered)} in all)" if len(shown) > 8 else ""
    return ",".join(shown[:8]) + more


def numbered(ranks: Sequence[int]) -> str:
    """ "rank 3" or "ranks 0-11,14"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {rank_list(ranks)}"


def _offset(pair: tuple[int, int]) -> int:
    return pair[1] - pair[0]
